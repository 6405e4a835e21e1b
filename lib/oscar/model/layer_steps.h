// What a layer does between its matrix products: a kernel of one pass over memory for bf16 rows on
// a GPU (oscar_kernels/forward.h), operations of torch elsewhere, rounded at the same places.
#pragma once

#include "oscar/checkpoint/layer_spec.h"
#include "oscar/model/torch.h"

namespace oscar {

// x [.., width], weight [width] in x's dtype or float32: RMSNorm in fp32, rounded once to x's
// dtype.
torch::Tensor rms_norm(const torch::Tensor& x, const torch::Tensor& weight, double eps);

// x + added, and the norm of that.
struct NormedSum {
  torch::Tensor sum, norm;
};
NormedSum add_and_norm(const torch::Tensor& x, const torch::Tensor& added,
                       const torch::Tensor& weight, double eps);

// Queries, keys and values [batch, heads, tokens, d] out of their joined product qkv [batch,
// tokens, num_qo_heads + 2 num_kv_heads, d]: queries and keys normed where there is a weight [d],
// then rotated by cos, sin [tokens, n/2] (attention.h). Values are a view of qkv.
struct HeadNorms {
  torch::Tensor q, k;  // undefined: none
  double eps = 0;
};
struct HeadRows {
  torch::Tensor q, k, v;
};
HeadRows split_and_rotate(const torch::Tensor& qkv, int64_t num_kv_heads, const HeadNorms& norms,
                          const torch::Tensor& cos, const torch::Tensor& sin);

// activation(gate) up of gate_up [.., 2 width]: [.., width].
torch::Tensor gated(const torch::Tensor& gate_up, Activation activation);

}  // namespace oscar
