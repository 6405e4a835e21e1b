// The forward pass, a layer at a time, and who watches it.
#include "oscar/model/transformer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/InferenceMode.h>
#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/model/attention.h"
#include "oscar/model/checkpoint/weights.h"
#include "oscar/model/layer_weights.h"

// Set by lib/CMakeLists.txt in builds with CUDA.
#if defined(OSCAR_HAS_KERNELS)
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "oscar_kernels/forward.h"
#endif

namespace oscar {

// The choice between the CUDA kernels and torch.

namespace {

#if defined(OSCAR_HAS_KERNELS)

bool kernel_reads(const torch::Tensor& x) {
  return !x.defined() || (x.is_cuda() && x.scalar_type() == torch::kBFloat16 && x.is_contiguous() &&
                          reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0);
}

uint16_t* rows_of(const torch::Tensor& x) {
  return x.defined() ? static_cast<uint16_t*>(x.data_ptr()) : nullptr;
}

// Launches on the stream of x's device. False when the kernel does not take these sizes.
template <typename Params>
bool launch(cudaError_t (*kernel)(const Params&, cudaStream_t), const Params& params,
            const torch::Tensor& x) {
  const c10::DeviceGuard guard(x.device());
  const c10::Stream stream =
      c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(x.device());
  const cudaError_t error = kernel(params, static_cast<cudaStream_t>(stream.native_handle()));
  if (error == cudaErrorNotSupported) return false;
  if (error != cudaSuccess) {
    throw Error({.what = "a step of the forward pass failed on the GPU",
                 .found = cudaGetErrorString(error),
                 .hint = "was the program built for this GPU (OSCAR_CUDA_ARCHITECTURES)?"});
  }
  return true;
}

bool norm_with_kernel(const torch::Tensor& x, const torch::Tensor& added, torch::Tensor& sum,
                      const torch::Tensor& weight, double eps, torch::Tensor& out) {
  if (!x.is_cuda() || !kernel_reads(x) || !kernel_reads(added) || !kernel_reads(weight)) {
    return false;
  }
  if (added.defined()) sum = torch::empty_like(x);
  out = torch::empty_like(x);
  const NormParams params{.rows = x.numel() / x.size(-1),
                          .width = static_cast<int>(x.size(-1)),
                          .eps = static_cast<float>(eps),
                          .x = rows_of(x),
                          .added = rows_of(added),
                          .sum = rows_of(sum),
                          .weight = rows_of(weight),
                          .out = rows_of(out)};
  return launch(&oscar::add_and_norm, params, x);
}

bool rotate_with_kernel(const torch::Tensor& qkv, int64_t num_kv_heads, const HeadNorms& norms,
                        const torch::Tensor& cos, const torch::Tensor& sin, torch::Tensor& q,
                        torch::Tensor& k) {
  if (!qkv.is_cuda() || !kernel_reads(qkv) || !kernel_reads(norms.q) || !kernel_reads(norms.k)) {
    return false;
  }
  const int64_t batch = qkv.size(0), tokens = qkv.size(1), d = qkv.size(3);
  const int64_t heads = qkv.size(2) - 2 * num_kv_heads;
  q = torch::empty({batch, tokens, heads, d}, qkv.options());
  k = torch::empty({batch, tokens, num_kv_heads, d}, qkv.options());
  const RotateParams params{.rows = batch * tokens,
                            .tokens = tokens,
                            .num_qo_heads = static_cast<int>(heads),
                            .num_kv_heads = static_cast<int>(num_kv_heads),
                            .head_dim = static_cast<int>(d),
                            .rotary_dim = static_cast<int>(2 * cos.size(-1)),
                            .eps = static_cast<float>(norms.eps),
                            .qkv = rows_of(qkv),
                            .q_norm = rows_of(norms.q),
                            .k_norm = rows_of(norms.k),
                            .cos = cos.data_ptr<float>(),
                            .sin = sin.data_ptr<float>(),
                            .q = rows_of(q),
                            .k = rows_of(k)};
  if (!launch(&norm_and_rotate, params, qkv)) return false;
  q = q.transpose(1, 2);
  k = k.transpose(1, 2);
  return true;
}

bool gate_with_kernel(const torch::Tensor& gate_up, torch::Tensor& out) {
  if (!gate_up.is_cuda() || !kernel_reads(gate_up)) return false;
  std::vector<int64_t> shape = gate_up.sizes().vec();
  shape.back() /= 2;
  out = torch::empty(shape, gate_up.options());
  const GateParams params{.rows = gate_up.numel() / gate_up.size(-1),
                          .width = static_cast<int>(shape.back()),
                          .gate_up = rows_of(gate_up),
                          .out = rows_of(out)};
  return launch(&oscar::gate, params, gate_up);
}

#else

bool norm_with_kernel(const torch::Tensor&, const torch::Tensor&, torch::Tensor&,
                      const torch::Tensor&, double, torch::Tensor&) {
  return false;
}
bool rotate_with_kernel(const torch::Tensor&, int64_t, const HeadNorms&, const torch::Tensor&,
                        const torch::Tensor&, torch::Tensor&, torch::Tensor&) {
  return false;
}
bool gate_with_kernel(const torch::Tensor&, torch::Tensor&) { return false; }

#endif

}  // namespace

// On the host in pieces that torch does not deal to its threads: at the end of a thread's share,
// what is over a vector's length gets other instructions, and bits would depend on the number of
// threads.
torch::Tensor by_pieces(const torch::Tensor& x, const ElementOp& op) {
  torch::Tensor out = torch::empty(x.sizes(), x.options());
  if (x.is_cuda() || x.numel() == 0) {
    op(out, x);
    return out;
  }
  const int64_t width = x.size(-1);
  const torch::Tensor from = x.reshape({-1, width}), to = out.view({-1, width});
  constexpr int64_t kWhole = int64_t{1} << 14;  // values; of gelu torch deals out more than these
  const int64_t columns = std::min(width, kWhole), rows = kWhole / columns;
  const int64_t across = (width + columns - 1) / columns, down = (from.size(0) + rows - 1) / rows;
  parallel_for(across * down, [&](int64_t index) {
    const c10::InferenceMode guard;  // of this thread
    const int64_t row = index / across * rows, column = index % across * columns;
    const auto piece = [&](const torch::Tensor& t) {
      return t.slice(0, row, row + rows).slice(1, column, column + columns);
    };
    torch::Tensor part = piece(to);
    op(part, piece(from));
  });
  return out;
}

torch::Tensor activated(const torch::Tensor& x, Activation activation) {
  return by_pieces(x, [activation](torch::Tensor& out, const torch::Tensor& in) {
    if (activation == Activation::kSilu) {
      at::silu_out(out, in);
    } else {
      at::gelu_out(out, in, "tanh");
    }
  });
}

torch::Tensor logistic(const torch::Tensor& x) {
  return by_pieces(x,
                   [](torch::Tensor& out, const torch::Tensor& in) { at::sigmoid_out(out, in); });
}

torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps) {
  torch::Tensor none, out;
  if (norm_with_kernel(x, {}, none, weight, eps, out)) return out;
  const torch::Tensor rows = x.to(weight.scalar_type());
  return torch::rms_norm(rows, {x.size(-1)}, weight, eps).to(x.scalar_type());
}

NormedSum add_and_norm(const torch::Tensor& x, const torch::Tensor& added,
                       const torch::Tensor& weight, double eps) {
  NormedSum result;
  if (norm_with_kernel(x, added, result.sum, weight, eps, result.norm)) return result;
  result.sum = x + added;
  result.norm = rms_norm(result.sum, weight, eps);
  return result;
}

RotatedRows split_and_rotate(const torch::Tensor& qkv, int64_t num_kv_heads, const HeadNorms& norms,
                             const torch::Tensor& cos, const torch::Tensor& sin) {
  const int64_t heads = qkv.size(2) - 2 * num_kv_heads;
  RotatedRows rows;
  rows.v = qkv.narrow(2, heads + num_kv_heads, num_kv_heads).transpose(1, 2);
  const int64_t d = qkv.size(3);
  const bool joint = norms.q.defined() && norms.q.size(0) != d;
  if (!joint && rotate_with_kernel(qkv, num_kv_heads, norms, cos, sin, rows.q, rows.k)) {
    return rows;
  }
  const auto head_rows = [&](int64_t first, int64_t count, const torch::Tensor& norm) {
    torch::Tensor own = qkv.narrow(2, first, count);
    if (joint) {
      own = rms_norm(own.flatten(2), norm, norms.eps).unflatten(2, {count, d});
    } else if (norm.defined()) {
      own = rms_norm(own, norm, norms.eps);
    }
    return apply_rope(own.transpose(1, 2), cos, sin);
  };
  rows.q = head_rows(0, heads, norms.q);
  rows.k = head_rows(heads, num_kv_heads, norms.k);
  return rows;
}

torch::Tensor gated(const torch::Tensor& gate_up, Activation activation) {
  torch::Tensor out;
  if (activation == Activation::kSilu && gate_with_kernel(gate_up, out)) return out;
  const auto halves = gate_up.chunk(2, -1);
  return activated(halves[0], activation) * halves[1];
}

// The forward pass: blocks of grouped-query attention and a gated MLP or experts, with norms before
// each and, in some families, behind each.

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

// [tokens, 1] in q's dtype: the factor on the queries at positions offset .. offset + tokens - 1;
// undefined where all are 1.
torch::Tensor query_factors(const QueryScaling& scaling, int64_t offset, const torch::Tensor& q) {
  const int64_t tokens = q.size(2);
  if (offset + tokens <= scaling.length) return {};
  const torch::Tensor turns =
      torch::arange(offset, offset + tokens, torch::dtype(torch::kInt64).device(q.device()))
          .div(scaling.length, /*rounding_mode=*/"floor");
  return (1 + scaling.beta * torch::log1p(turns.to(torch::kFloat64)))
      .to(q.scalar_type())
      .unsqueeze(1);
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
  return std::make_shared<const LayerWeights>(
      load_layer_weights(*implementation_->checkpoint.weights, layer_weights(config(), layer),
                         config(), layer, compute()));
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
                                         AttentionEngine* engine, int64_t position_offset,
                                         DeltaState* state) const {
  const c10::InferenceMode guard;
  const ModelConfig& c = config();
  const LayerSpec& spec = c.layer(layer);
  const int64_t batch = hidden.size(0), tokens = hidden.size(1), d = c.head_dim;
  const int64_t heads = c.num_qo_heads, kv_heads = c.num_kv_heads;

  const auto attention = [&] {  // what it makes on the way is freed before the MLP
    const torch::Tensor x = rms_norm(hidden, weights.attention_norm, c.rms_norm_eps);
    if (spec.delta_net) {
      return gated_delta_net(x, weights.delta_net, *spec.delta_net, c.rms_norm_eps, state);
    }
    const torch::Tensor qkv = torch::linear(x, weights.qkv, weights.qkv_bias)
                                  .view({batch, tokens, heads + 2 * kv_heads, d});
    const Angles& angles = implementation_->angles_at(layer, position_offset, tokens);
    HeadNorms norms;
    norms.eps = c.rms_norm_eps;
    if (spec.attention.qk_norm) norms.q = weights.q_norm, norms.k = weights.k_norm;
    const auto [q, k, v] = split_and_rotate(qkv, kv_heads, norms, angles.cos, angles.sin);
    if (c.query_scaling) {
      const torch::Tensor factors = query_factors(*c.query_scaling, position_offset, q);
      if (factors.defined()) torch::Tensor(q).mul_(factors);
    }
    const torch::Tensor o = engine != nullptr
                                ? engine->attend(layer, q, k, v, c.sm_scale)
                                : causal_attention(q, k, v, c.sm_scale, spec.attention.window);
    torch::Tensor rows = o.transpose(1, 2).reshape({batch, tokens, heads * d}), gate;
    if (spec.attention.gated) {
      const torch::Tensor s = logistic(torch::linear(x, weights.o_gate));
      rows = rows * s;
      gate = s.view({batch, tokens, heads, d}).transpose(1, 2);
    }
    if (observer != nullptr) {
      observer->observe({layer, position_offset, c.sm_scale, q, k, v, o, gate});
    }
    return torch::linear(rows, weights.o, weights.o_bias);
  };
  torch::Tensor half = attention();
  if (spec.output_norms) half = rms_norm(half, weights.attention_output_norm, c.rms_norm_eps);
  const auto [attended, y] = add_and_norm(hidden, half, weights.mlp_norm, c.rms_norm_eps);
  torch::Tensor out = attended;
  if (spec.dense_intermediate_size() > 0) {
    half = gated_mlp(y, weights, activation_of(spec));
    if (weights.shared_gate.defined()) {
      half = half * logistic(torch::linear(y, weights.shared_gate));
    }
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

// Token-by-token sampling; the cache is an attention engine, so the forward pass knows none of it.

namespace {

// Keys and values of every layer in preallocated tensors; attends one new token to all of them.
class CachedAttention final : public AttentionEngine {
 public:
  CachedAttention(const ModelConfig& config, const ComputeOptions& compute, int64_t batch,
                  int64_t capacity)
      : config_(config) {
    const auto options = torch::dtype(compute.dtype).device(compute.device);
    for (int layer = 0; layer < config.num_layers; ++layer) {
      const int64_t rows = config.layer(layer).delta_net ? 0 : capacity;
      keys_.push_back(torch::empty({batch, config.num_kv_heads, rows, config.head_dim}, options));
      values_.push_back(torch::empty_like(keys_.back()));
    }
  }

  torch::Tensor attend(int layer, const torch::Tensor& q, const torch::Tensor& k,
                       const torch::Tensor& v, double sm_scale) override {
    const auto index = static_cast<size_t>(layer);
    keys_[index].narrow(2, length_, 1).copy_(k);
    values_[index].narrow(2, length_, 1).copy_(v);
    const int64_t end = length_ + 1;
    int64_t begin = 0;
    const int64_t window = config_.layer(layer).attention.window;
    if (window > 0) begin = std::max<int64_t>(0, end - window);
    return torch::scaled_dot_product_attention(
        q, keys_[index].narrow(2, begin, end - begin), values_[index].narrow(2, begin, end - begin),
        /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/false, sm_scale, /*enable_gqa=*/true);
  }

  void advance() { ++length_; }

 private:
  const ModelConfig& config_;
  std::vector<torch::Tensor> keys_, values_;
  int64_t length_ = 0;
};

}  // namespace

std::vector<std::vector<int32_t>> generate(Transformer& model, const GenerateOptions& options,
                                           Progress& progress) {
  const torch::InferenceMode inference;
  const ModelConfig& config = model.config();
  const torch::Device device = model.compute().device;
  std::vector<std::shared_ptr<const LayerWeights>> layers;
  for (int layer = 0; layer < config.num_layers; ++layer) layers.push_back(model.load_layer(layer));

  // Drawn on the CPU, so that a seed means the same uniform numbers on every device.
  at::Generator random = at::detail::createCPUGenerator(options.seed);
  CachedAttention cache(config, model.compute(), options.num_sequences, options.length);
  std::vector<DeltaState> states(layers.size());
  torch::Tensor tokens = torch::full({options.num_sequences, options.length}, options.first_token,
                                     torch::dtype(torch::kInt64).device(device));
  for (int64_t t = 0; t + 1 < options.length; ++t) {
    torch::Tensor hidden = model.embed(tokens.narrow(1, t, 1));
    for (int layer = 0; layer < config.num_layers; ++layer) {
      const auto index = static_cast<size_t>(layer);
      hidden =
          model.forward_layer(layer, *layers[index], hidden, nullptr, &cache, t, &states[index]);
    }
    cache.advance();
    const torch::Tensor probabilities = torch::softmax(
        model.logits(hidden).select(1, 0).to(torch::kFloat64) / options.temperature, -1);
    const torch::Tensor uniform =
        torch::rand({options.num_sequences, 1}, random, torch::kFloat64).to(device);
    const torch::Tensor next =
        torch::searchsorted(probabilities.cumsum(-1), uniform).clamp_max(config.vocab_size - 1);
    tokens.select(1, t + 1).copy_(next.select(1, 0));
    progress.advance(options.num_sequences);
  }

  const torch::Tensor host = tokens.to(torch::kCPU).contiguous();
  std::vector<std::vector<int32_t>> sequences;
  for (int64_t i = 0; i < options.num_sequences; ++i) {
    const auto* row = host.data_ptr<int64_t>() + i * options.length;
    sequences.emplace_back(row, row + options.length);
  }
  return sequences;
}

}  // namespace oscar
