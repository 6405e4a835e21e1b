// Parts of a layer: attention and experts.
#pragma once

#include "oscar/model/checkpoint/config.h"
#include "oscar/model/checkpoint/rope.h"
#include "oscar/model/layer_weights.h"
#include "oscar/model/torch.h"

namespace oscar {

// Causal attention of one layer, full or with a sliding window, and the rotation of q and k.

// x [batch, heads, tokens, d]; cos, sin [tokens, n/2] fp32, n <= d. The pair (i, i + n/2) turns by
// the angle of column i; dimensions from n on stay. Computed in fp32, returned in x's dtype (arXiv
// 2104.09864).
torch::Tensor apply_rope(const torch::Tensor& x, const torch::Tensor& cos,
                         const torch::Tensor& sin);

// Queries or keys as they would be positions[t] positions later, or earlier where that is negative:
// x [.., tokens, d] after RoPE, positions [tokens] or [1]. Float32, on x's device; scores between
// equally moved rows do not change.
torch::Tensor move_positions(const torch::Tensor& x, const Rope& rope,
                             const torch::Tensor& positions);

// softmax(sm_scale q k^T) v per query head; query i sees keys j <= i, and with window > 0 only
// i - window < j. q [batch, num_qo_heads, tokens, d], k and v [batch, num_kv_heads, tokens, d];
// query head h reads KV head h / (num_qo_heads / num_kv_heads). Memory grows linearly in tokens.
torch::Tensor causal_attention(const torch::Tensor& q, const torch::Tensor& k,
                               const torch::Tensor& v, double sm_scale, int64_t window);

// Mixtures of experts: which experts a token passes through, and what they make of it.

// The choice of every token.
struct Routing {
  torch::Tensor experts;  // [tokens, top_k] int64, in no order
  torch::Tensor weights;  // [tokens, top_k] fp32
};

// x [tokens, hidden], after the norm. Logits, scores and weights are fp32, whatever x is.
Routing route(const torch::Tensor& x, const LayerWeights& weights, const ExpertsSpec& spec);

// sum over a token's experts of weight * expert(x), [tokens, hidden] in x's dtype. The rows of all
// tokens are sorted by expert, so that each expert's weights are read once; the sum's order does
// not depend on who else is in the batch.
torch::Tensor run_experts(const torch::Tensor& x, const Routing& routing,
                          const LayerWeights& weights);

// Rows of x times the transposed matrix of their expert: x [rows, columns], sorted by expert,
// matrices [num_experts, out, columns], ends [num_experts] int32: one past each expert's last row.
torch::Tensor expert_products(const torch::Tensor& x, const torch::Tensor& matrices,
                              const torch::Tensor& ends);

}  // namespace oscar
