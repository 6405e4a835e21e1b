// The weights of one layer with the transform of its values folded in (math 6.5).
#pragma once

#include <cstddef>
#include <vector>

#include "oscar/io/safetensors.h"
#include "oscar/linalg/tensor.h"

namespace oscar {

// v' = (v - mean) forward and o = o' inverse + mean, for each KV head.
struct ValueFold {
  int num_qo_heads = 0;
  std::vector<MatrixD> forward, inverse;  // [Hkv] of [d, d]
  std::vector<VectorD> mean;  // [Hkv] of [d], given back by the output bias; empty: left alone

  int num_kv_heads() const { return static_cast<int>(forward.size()); }
  int head_dim() const { return static_cast<int>(forward.front().rows()); }
};

// New bytes of a tensor in its own dtype, computed in float64 and rounded once (to nearest even).
// Throws Error when a value does not fit the dtype.
//   value weight  [Hkv d, hidden]  A_h <- forward^T A_h
//   value bias    [Hkv d]          b_h <- (b_h - mean_h) forward
//   output weight [hidden, Hq d]   B_j <- B_j inverse_h^T, h the KV head of query head j
//   output bias   [hidden]         c <- c + sum over j of mean_h B_j^T, from the old output weight
std::vector<std::byte> fold_value_weight(const TensorView& weight, const ValueFold& fold);
std::vector<std::byte> fold_value_bias(const TensorView& bias, const ValueFold& fold);
std::vector<std::byte> fold_output_weight(const TensorView& weight, const ValueFold& fold);
std::vector<std::byte> fold_output_bias(const TensorView& bias, const TensorView& output_weight,
                                        const ValueFold& fold);

// The tensors that a fold changes; no data where the model has no such bias.
struct ValueWeights {
  TensorView value, value_bias, output, output_bias;
};

// What attention adds to the residual stream for tokens that attend to themselves only:
// (x A^T + b) B^T + c, each value given to the query heads of its KV head. inputs [n, hidden],
// result [n, hidden].
MatrixD attended_to_self(const ValueWeights& weights, const MatrixD& inputs, int num_qo_heads,
                         int num_kv_heads);

}  // namespace oscar
