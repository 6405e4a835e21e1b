// Token-by-token sampling; the cache is an attention engine, so the forward pass knows none of it.
#include "oscar/model/generate.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

namespace oscar {
namespace {

// Keys and values of every layer in preallocated tensors; attends one new token to all of them.
class CachedAttention final : public AttentionEngine {
 public:
  CachedAttention(const ModelConfig& config, const ComputeOptions& compute, int64_t batch,
                  int64_t capacity)
      : config_(config) {
    const auto options = torch::dtype(compute.dtype).device(compute.device);
    for (int layer = 0; layer < config.num_layers; ++layer) {
      keys_.push_back(
          torch::empty({batch, config.num_kv_heads, capacity, config.head_dim}, options));
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
  torch::Tensor tokens = torch::full({options.num_sequences, options.length}, options.first_token,
                                     torch::dtype(torch::kInt64).device(device));
  for (int64_t t = 0; t + 1 < options.length; ++t) {
    torch::Tensor hidden = model.embed(tokens.narrow(1, t, 1));
    for (int layer = 0; layer < config.num_layers; ++layer) {
      hidden = model.forward_layer(layer, *layers[static_cast<size_t>(layer)], hidden, nullptr,
                                   &cache, t);
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
