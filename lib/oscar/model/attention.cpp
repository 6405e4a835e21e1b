// Attention through torch's fused kernels: no tokens x tokens matrix is ever made.
#include "oscar/model/attention.h"

#include <algorithm>
#include <vector>

namespace oscar {
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
  const auto first = rows.narrow(-1, 0, half), second = rows.narrow(-1, half, half);
  return torch::cat({first * cos - second * sin, second * cos + first * sin,
                     rows.narrow(-1, 2 * half, rows.size(-1) - 2 * half)},
                    -1);
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

}  // namespace oscar
