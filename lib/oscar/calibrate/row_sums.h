// Sums of x^T x and of x over the rows of attention tensors, per KV head, in float64.
#pragma once

#include <span>

#include "oscar/model/torch.h"

namespace oscar {

struct RowSums {
  torch::Tensor moment;  // [num_kv_heads, d, d] float64, contiguous
  torch::Tensor sum;     // [num_kv_heads, d] float64, contiguous
};

struct RowSumsTask {
  const torch::Tensor& rows;  // [batch, heads, tokens, d]; consecutive heads share a KV head
  RowSums& sums;              // on the device of `rows`
};

// Adds the sums of at most four tensors. bf16 rows on a GPU go through the kernel of
// oscar_kernels/gram.h (in builds with CUDA, for the head_dims it lists): together, without a copy
// of the rows, within 1e-6 of float64. All others are converted to float64 a head at a time, so
// that intermediates of a long context stay small. Throws Error when the kernel cannot run.
void add_row_sums(std::span<const RowSumsTask> tasks);

// [batch, heads, tokens, d] -> [num_kv_heads, rows, d]: rows run over batch, query heads, tokens.
torch::Tensor rows_by_kv_head(const torch::Tensor& x, int64_t num_kv_heads);

}  // namespace oscar
