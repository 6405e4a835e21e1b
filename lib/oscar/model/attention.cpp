// Parts of a layer: attention and experts.
#include "oscar/model/attention.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "oscar/model/transformer.h"

namespace oscar {

// Attention through torch's fused kernels: no tokens x tokens matrix is ever made.

namespace {

// Queries of one block of a sliding layer: the mask of a block is kBlock x (kBlock + window).
constexpr int64_t kBlock = 512;

// Only CUDA's flash kernel reads shared KV heads by itself; it takes 16-bit inputs only. Elsewhere
// torch would fall back to the unfused path, so the heads are repeated.
bool kernel_shares_heads(const torch::Tensor& q) {
  return q.is_cuda() && q.scalar_type() != torch::kFloat32 && q.size(3) <= 256;
}

torch::Tensor repeat_heads(const torch::Tensor& x, int64_t group) {
  if (group == 1) return x;
  return x.unsqueeze(2)
      .expand({x.size(0), x.size(1), group, x.size(2), x.size(3)})
      .reshape({x.size(0), x.size(1) * group, x.size(2), x.size(3)});
}

torch::Tensor full_attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                             double sm_scale) {
  const int64_t group = q.size(1) / k.size(1);
  if (group > 1 && kernel_shares_heads(q)) {
    return torch::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true, sm_scale,
                                               /*enable_gqa=*/true);
  }
  return torch::scaled_dot_product_attention(q, repeat_heads(k, group), repeat_heads(v, group), {},
                                             0.0, /*is_causal=*/true, sm_scale);
}

// True where query begin + row sees key first + column.
torch::Tensor window_mask(int64_t begin, int64_t end, int64_t first, int64_t window,
                          torch::Device device) {
  const auto options = torch::dtype(torch::kInt64).device(device);
  const torch::Tensor query = torch::arange(begin, end, options).unsqueeze(1);
  const torch::Tensor key = torch::arange(first, end, options).unsqueeze(0);
  return (key <= query).logical_and(key > query - window);
}

}  // namespace

torch::Tensor apply_rope(const torch::Tensor& x, const torch::Tensor& cos,
                         const torch::Tensor& sin) {
  // Each half: one product in fp32, then the other added and rounded on the way out. No
  // further pass over memory joins or rounds.
  torch::Tensor y = torch::empty_like(x);
  const int64_t half = cos.size(-1), still = x.size(-1) - 2 * half;
  const torch::Tensor first = x.narrow(-1, 0, half), second = x.narrow(-1, half, half);
  torch::Tensor low = y.narrow(-1, 0, half), high = y.narrow(-1, half, half);
  at::addcmul_out(low, first * cos, second, sin, -1);
  at::addcmul_out(high, second * cos, first, sin);
  if (still > 0) y.narrow(-1, 2 * half, still).copy_(x.narrow(-1, 2 * half, still));
  return y;
}

torch::Tensor move_positions(const torch::Tensor& x, const Rope& rope,
                             const torch::Tensor& positions) {
  const auto rows = x.to(torch::kFloat32);
  const int64_t half = rope.rotary_dim / 2;
  if (half == 0) return rows;
  // Copies that nothing waits for: what they read is copied before they return.
  const auto on_device = [&](const torch::Tensor& numbers) {
    return numbers.to(x.device(), torch::kFloat64, /*non_blocking=*/true);
  };
  const auto angles =
      torch::outer(on_device(positions), on_device(torch::tensor(rope.inv_freq, torch::kFloat64)));
  const auto cos = angles.cos().to(torch::kFloat32);
  const auto sin = angles.sin().to(torch::kFloat32);
  const auto still = rows.narrow(-1, 2 * half, rows.size(-1) - 2 * half);
  if (rope.interleaved) {
    const auto first = rows.slice(-1, 0, 2 * half, 2), second = rows.slice(-1, 1, 2 * half, 2);
    const auto pairs = torch::stack({first * cos - second * sin, second * cos + first * sin}, -1);
    return torch::cat({pairs.flatten(-2), still}, -1);
  }
  const auto first = rows.narrow(-1, 0, half), second = rows.narrow(-1, half, half);
  return torch::cat({first * cos - second * sin, second * cos + first * sin, still}, -1);
}

torch::Tensor causal_attention(const torch::Tensor& q, const torch::Tensor& k,
                               const torch::Tensor& v, double sm_scale, int64_t window) {
  const int64_t tokens = q.size(2), group = q.size(1) / k.size(1);
  if (window <= 0 || window >= tokens) return full_attention(q, k, v, sm_scale);
  std::vector<torch::Tensor> blocks;
  for (int64_t begin = 0; begin < tokens; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, tokens);
    const int64_t first = std::max<int64_t>(begin - window + 1, 0);
    const torch::Tensor keys = repeat_heads(k.slice(2, first, end), group);
    const torch::Tensor values = repeat_heads(v.slice(2, first, end), group);
    blocks.push_back(torch::scaled_dot_product_attention(
        q.slice(2, begin, end), keys, values, window_mask(begin, end, first, window, q.device()),
        0.0, /*is_causal=*/false, sm_scale));
  }
  return torch::cat(blocks, 2);
}

// Scores, choice, and products grouped by expert.

namespace {

// Scores with minus infinity for the experts outside the chosen sets.
torch::Tensor within_top_sets(const torch::Tensor& scores, const ExpertsSpec& spec) {
  const torch::Tensor sets = scores.view({scores.size(0), spec.num_sets, -1});
  const torch::Tensor of_set = std::get<0>(sets.topk(2, -1)).sum(-1);
  const torch::Tensor chosen = std::get<1>(of_set.topk(spec.top_sets, -1));
  const torch::Tensor left_out =
      torch::ones_like(of_set, torch::kBool).scatter(1, chosen, /*value=*/0);
  return sets.masked_fill(left_out.unsqueeze(-1), -std::numeric_limits<float>::infinity())
      .view(scores.sizes());
}

// The grouped kernel wants rows that begin at multiples of 16 bytes.
bool is_aligned(const torch::Tensor& x) {
  return x.size(-1) * static_cast<int64_t>(x.element_size()) % 16 == 0;
}

}  // namespace

Routing route(const torch::Tensor& x, const LayerWeights& weights, const ExpertsSpec& spec) {
  const torch::Tensor logits = torch::linear(x.to(torch::kFloat32), weights.router);
  const torch::Tensor scores =
      spec.score == RouterScore::kSoftmax ? logits.softmax(-1) : logits.sigmoid();
  torch::Tensor wanted = spec.choice_bias ? scores + weights.choice_bias : scores;
  if (spec.top_sets < spec.num_sets) wanted = within_top_sets(wanted, spec);
  Routing routing{std::get<1>(wanted.topk(spec.top_k, -1)), {}};
  routing.weights = scores.gather(1, routing.experts);
  // Sigmoids may all be 0 in float32; where they are not, the addend changes no bit.
  constexpr double kTiny = 1e-20;
  if (spec.normalize) routing.weights = routing.weights / (routing.weights.sum(-1, true) + kTiny);
  if (spec.scaling != 1.0) routing.weights = routing.weights * spec.scaling;
  return routing;
}

torch::Tensor expert_products(const torch::Tensor& x, const torch::Tensor& matrices,
                              const torch::Tensor& ends) {
  if (is_aligned(x)) return at::_grouped_mm(x, matrices.transpose(1, 2), ends);
  torch::Tensor out = torch::empty({x.size(0), matrices.size(1)}, x.options());
  const torch::Tensor on_host = ends.to(torch::kCPU, torch::kInt64);
  int64_t begin = 0;
  for (int64_t expert = 0; expert < matrices.size(0); ++expert) {
    const int64_t end = on_host[expert].item<int64_t>();
    torch::Tensor rows = out.slice(0, begin, end);
    at::mm_out(rows, x.slice(0, begin, end), matrices[expert].t());
    begin = end;
  }
  return out;
}

torch::Tensor run_experts(const torch::Tensor& x, const Routing& routing,
                          const LayerWeights& weights) {
  const int64_t tokens = x.size(0), top_k = routing.experts.size(1);
  const auto [sorted, order] =
      routing.experts.flatten().sort(/*stable=*/std::optional<bool>(true), /*dim=*/0);
  const torch::Tensor ends = torch::searchsorted(
      sorted, torch::arange(weights.router.size(0), sorted.options()), /*out_int32=*/true,
      /*right=*/true);
  torch::Tensor inner;
  {
    const torch::Tensor rows = x.index_select(0, order.div(top_k, "floor"));
    inner = gated(expert_products(rows, weights.expert_gate_up, ends), Activation::kSilu);
  }
  const torch::Tensor by_expert = expert_products(inner, weights.expert_down, ends);
  inner.reset();
  torch::Tensor outputs = torch::empty_like(by_expert);
  outputs.index_copy_(0, order, by_expert);
  return torch::bmm(routing.weights.to(x.scalar_type()).unsqueeze(1),
                    outputs.view({tokens, top_k, x.size(1)}))
      .squeeze(1);
}

}  // namespace oscar
