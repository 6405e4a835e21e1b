// Mixtures of experts: which experts a token passes through, and what they make of it.
#pragma once

#include "oscar/checkpoint/layer_spec.h"
#include "oscar/model/layer_weights.h"
#include "oscar/model/torch.h"

namespace oscar {

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
