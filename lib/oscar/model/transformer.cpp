// The forward pass: blocks of grouped-query attention and a gated MLP or experts, with norms before
// each and, in some families, behind each.
#include "oscar/model/transformer.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/checkpoint/weight_table.h"
#include "oscar/model/attention.h"
#include "oscar/model/experts.h"
#include "oscar/model/layer_steps.h"
#include "oscar/model/layer_weights.h"

namespace oscar {
namespace {

// Products in full precision: TF32 and 16-bit accumulation would show in the statistics.
void forbid_reduced_precision() {
  at::globalContext().setAllowTF32CuBLAS(false);
  at::globalContext().setAllowTF32CuDNN(false);
  at::globalContext().setAllowBF16ReductionCuBLAS(false);
  at::globalContext().setAllowFP16ReductionCuBLAS(false);
}

// cuDNN's attention is the fastest on Hopper and later, and steps aside where it does not take a
// shape; torch itself tries flash attention first.
void prefer_cudnn_attention() {
  std::vector<int64_t> order;
  for (const auto backend :
       {at::SDPBackend::cudnn_attention, at::SDPBackend::flash_attention,
        at::SDPBackend::efficient_attention, at::SDPBackend::math, at::SDPBackend::overrideable}) {
    order.push_back(static_cast<int64_t>(backend));
  }
  at::globalContext().setSDPPriorityOrder(order);
}

// cos and sin of positions offset .. offset + tokens - 1; angles in float64.
struct Angles {
  int64_t offset = -1, tokens = 0;
  torch::Tensor cos, sin;  // [tokens, rotary_dim / 2] fp32
};

Angles make_angles(const Rope& rope, int64_t offset, int64_t tokens, torch::Device device) {
  const auto options = torch::dtype(torch::kFloat64);
  const torch::Tensor frequencies = torch::tensor(rope.inv_freq, options).to(device);
  const torch::Tensor positions = torch::arange(offset, offset + tokens, options.device(device));
  const torch::Tensor angles = positions.unsqueeze(1) * frequencies.unsqueeze(0);
  return {offset, tokens, (angles.cos() * rope.attention_factor).to(torch::kFloat32),
          (angles.sin() * rope.attention_factor).to(torch::kFloat32)};
}

torch::Tensor gated_mlp(const torch::Tensor& x, const LayerWeights& weights,
                        Activation activation) {
  const torch::Tensor inner =
      gated(torch::linear(x, weights.gate_up, weights.gate_up_bias), activation);
  return torch::linear(inner, weights.down, weights.down_bias);
}

// Of the MLP, or of the expert that all tokens share.
Activation activation_of(const LayerSpec& layer) {
  const DenseSpec* dense = std::get_if<DenseSpec>(&layer.mlp);
  return dense != nullptr ? dense->activation : Activation::kSilu;
}

}  // namespace

struct Transformer::Implementation {
  const Checkpoint& checkpoint;
  ComputeOptions options;
  torch::Tensor final_norm;         // read at once: whoever needs no logits learns of damage too
  torch::Tensor embedding, output;  // loaded when first used, then kept
  Angles angles, local_angles;      // of the last call: layers share positions
  std::vector<std::shared_ptr<const LayerWeights>> kept_layers = {};

  const ModelConfig& config() const { return checkpoint.config; }

  torch::Tensor load(WeightRole role, const std::vector<WeightSpec>& specs) const {
    for (const WeightSpec& spec : specs) {
      if (spec.role == role) {
        return load_weight(*checkpoint.weights, spec, options);
      }
    }
    return {};
  }
  torch::Tensor load(WeightRole role) const { return load(role, model_weights(config())); }

  // [hidden, num_qo_heads * head_dim].
  torch::Tensor output_projection(int layer) const {
    const auto index = static_cast<size_t>(layer);
    if (index < kept_layers.size() && kept_layers[index]) return kept_layers[index]->o;
    return load(WeightRole::kO, layer_weights(config(), layer));
  }

  const torch::Tensor& embedding_weight() {
    if (!embedding.defined()) embedding = load(WeightRole::kEmbedding);
    return embedding;
  }

  const Angles& angles_at(int layer, int64_t offset, int64_t tokens) {
    Angles& known = config().layer(layer).attention.local ? local_angles : angles;
    if (known.offset != offset || known.tokens != tokens) {
      known = make_angles(config().rope_of(layer), offset, tokens, options.device);
    }
    return known;
  }
};

Transformer::Transformer(const Checkpoint& checkpoint, ComputeOptions options)
    : implementation_(new Implementation{checkpoint, options, {}, {}, {}, {}, {}}) {
  forbid_reduced_precision();
  if (options.device.is_cuda()) prefer_cudnn_attention();
  check_weights(checkpoint.config, *checkpoint.weights);
  implementation_->final_norm = implementation_->load(WeightRole::kFinalNorm);
}

Transformer::~Transformer() = default;

const ModelConfig& Transformer::config() const { return implementation_->config(); }
const ComputeOptions& Transformer::compute() const { return implementation_->options; }

torch::Tensor Transformer::embed(const torch::Tensor& ids) {
  const c10::InferenceMode guard;
  const int64_t vocab = config().vocab_size;
  if (ids.numel() > 0 && (ids.min().item<int64_t>() < 0 || ids.max().item<int64_t>() >= vocab)) {
    throw Error({.what = "a token id is outside the vocabulary",
                 .where = implementation_->checkpoint.name,
                 .expected = "0 to " + std::to_string(vocab - 1),
                 .found = std::to_string(ids.min().item<int64_t>()) + " to " +
                          std::to_string(ids.max().item<int64_t>())});
  }
  const torch::Tensor hidden =
      torch::embedding(implementation_->embedding_weight(), ids.to(compute().device));
  if (config().embedding_scale == 1) return hidden;
  return hidden * torch::tensor(config().embedding_scale, hidden.options());
}

std::shared_ptr<const LayerWeights> Transformer::load_layer(int layer) const {
  const c10::InferenceMode guard;
  return std::make_shared<const LayerWeights>(load_layer_weights(
      *implementation_->checkpoint.weights, layer_weights(config(), layer), compute()));
}

void Transformer::read_ahead(int layer) const {
  oscar::read_ahead(*implementation_->checkpoint.weights, layer_weights(config(), layer));
}

std::vector<std::shared_ptr<const LayerWeights>>& Transformer::kept_layers() {
  auto& kept = implementation_->kept_layers;
  kept.resize(static_cast<size_t>(config().num_layers));
  return kept;
}

size_t Transformer::layer_bytes(int layer) const {
  return layer_weight_bytes(layer_weights(config(), layer), compute().dtype);
}

torch::Tensor Transformer::forward_layer(int layer, const LayerWeights& weights,
                                         const torch::Tensor& hidden, AttentionObserver* observer,
                                         AttentionEngine* engine, int64_t position_offset) const {
  const c10::InferenceMode guard;
  const ModelConfig& c = config();
  const LayerSpec& spec = c.layer(layer);
  const int64_t batch = hidden.size(0), tokens = hidden.size(1), d = c.head_dim;
  const int64_t heads = c.num_qo_heads, kv_heads = c.num_kv_heads;

  const auto attention = [&] {  // what it makes on the way is freed before the MLP
    const torch::Tensor x = rms_norm(hidden, weights.attention_norm, c.rms_norm_eps);
    const torch::Tensor qkv = torch::linear(x, weights.qkv, weights.qkv_bias)
                                  .view({batch, tokens, heads + 2 * kv_heads, d});
    const Angles& angles = implementation_->angles_at(layer, position_offset, tokens);
    HeadNorms norms;
    norms.eps = c.rms_norm_eps;
    if (spec.attention.qk_norm) norms.q = weights.q_norm, norms.k = weights.k_norm;
    const auto [q, k, v] = split_and_rotate(qkv, kv_heads, norms, angles.cos, angles.sin);
    const torch::Tensor o = engine != nullptr
                                ? engine->attend(layer, q, k, v, c.sm_scale)
                                : causal_attention(q, k, v, c.sm_scale, spec.attention.window);
    if (observer != nullptr) observer->observe({layer, position_offset, c.sm_scale, q, k, v, o});
    const torch::Tensor rows = o.transpose(1, 2).reshape({batch, tokens, heads * d});
    return torch::linear(rows, weights.o, weights.o_bias);
  };
  torch::Tensor half = attention();
  if (spec.output_norms) half = rms_norm(half, weights.attention_output_norm, c.rms_norm_eps);
  const auto [attended, y] = add_and_norm(hidden, half, weights.mlp_norm, c.rms_norm_eps);
  torch::Tensor out = attended;
  if (spec.dense_intermediate_size() > 0) {
    half = gated_mlp(y, weights, activation_of(spec));
    if (spec.output_norms) half = rms_norm(half, weights.mlp_output_norm, c.rms_norm_eps);
    out = out + half;
  }
  if (const ExpertsSpec* experts = spec.experts()) {
    const torch::Tensor flat = y.reshape({batch * tokens, c.hidden_size});
    out = out + run_experts(flat, route(flat, weights, *experts), weights).view(out.sizes());
  }
  return out;
}

torch::Tensor Transformer::logits(const torch::Tensor& hidden) {
  const c10::InferenceMode guard;
  Implementation& self = *implementation_;
  if (!self.output.defined()) {
    self.output =
        config().tie_word_embeddings ? self.embedding_weight() : self.load(WeightRole::kOutput);
  }
  const torch::Tensor x = rms_norm(hidden, self.final_norm, config().rms_norm_eps);
  return torch::linear(x, self.output).to(torch::kFloat32);
}

// Of `joined` neighbouring query heads at a time: sum over them of W_j W_j^T, W_j [d, hidden], as
// the forward pass has it.
MatrixStack<double> Transformer::output_metrics(int layer, int joined) const {
  const c10::InferenceMode guard;
  const ModelConfig& c = config();
  const int64_t d = c.head_dim;
  const int count = c.num_qo_heads / joined;
  MatrixStack<double> metric(count, c.head_dim, c.head_dim);
  const torch::Tensor o = implementation_->output_projection(layer);
  torch::Tensor sums =
      torch::empty({count, d, d}, torch::dtype(torch::kFloat64).device(o.device()));
  for (int i = 0; i < count; ++i) {
    const torch::Tensor heads = o.narrow(1, i * joined * d, joined * d)
                                    .to(torch::kFloat64)
                                    .reshape({-1, d});  // [hidden * joined, d]
    sums[i].copy_(torch::mm(heads.t(), heads));
  }
  const torch::Tensor host = sums.to(torch::kCPU);
  std::copy_n(host.data_ptr<double>(), host.numel(), metric.data.data());
  return metric;
}

MatrixStack<double> Transformer::o_proj_metric(int layer) const {
  return output_metrics(layer, config().num_qo_heads / config().num_kv_heads);
}

MatrixStack<double> Transformer::o_proj_head_metrics(int layer) const {
  return output_metrics(layer, 1);
}

}  // namespace oscar
