// The tensors of the operators, checked, as the structs that the CPU twins and the kernels take.
#pragma once

#include <optional>

#include "checks.h"
#include "oscar/cache/pages.h"

namespace oscar::torch_ops {

using OptionalTensor = std::optional<Tensor>;

// How codes and metadata lie in a page.
struct FormatArguments {
  int64_t quant_group_size = 0;
  std::optional<ScalarType> metadata_dtype = {};  // none: float16
};

// The cache of one layer, as both operators see it. Like the other structs it only refers to the
// arguments of the call.
struct CacheTensors {
  const Tensor& pool;                 // uint8 [num_pages, num_kv_heads, chunk_bytes]
  const Tensor& block_table;          // int32 [batch, pages at most], any stride between rows
  const Tensor& window_k;             // bf16 [slots, num_kv_heads, sink + ring tokens, head_dim]
  const Tensor& window_v;             // the same
  const OptionalTensor& window_slot;  // int32 [batch]; none: the request's index
  int64_t sink_tokens = 0;
  const OptionalTensor& key_centres;     // bf16 [segments, num_kv_heads, 2, head_dim]
  const OptionalTensor& first_position;  // int32 [batch]; none: 0
};

struct AttentionTensors {
  const Tensor& q;            // bf16 [batch, q_len, num_qo_heads, head_dim]
  const Tensor& history_len;  // int32 [batch]
  const Tensor& seq_len;      // int32 [batch]
  double sm_scale = 1.0;
};

struct AppendTensors {
  const Tensor& k;  // bf16 [rows, num_kv_heads, head_dim], any strides between rows and heads
  const Tensor& v;  // the same
  const Tensor& rows_indptr;                          // int32 [batch + 1]
  const Tensor& old_len;                              // int32 [batch]
  const Tensor& old_history;                          // int32 [batch]
  const Tensor& new_history;                          // int32 [batch]
  const Tensor& status;                               // int32 [slots], RowStatus bits
  const OptionalTensor &clip_k, &clip_v;              // float32 [num_kv_heads]
  const OptionalTensor &feedback_k, &feedback_v;      // float32 [num_kv_heads, head_dim, head_dim]
  const OptionalTensor &metric_k, &metric_v;          // the same
  const OptionalTensor &correction_k, &correction_v;  // uint8 [num_kv_heads], ScaleCorrection
};

struct HistoryTensors {
  const Tensor& pool;         // as in CacheTensors
  const Tensor& block_table;  // the same
  const Tensor& history_len;  // int32 [batch]
  const Tensor& k;  // bf16 or float32 [batch, tokens, num_kv_heads, head_dim], rows may lie apart
  const Tensor& v;  // the same
  int64_t sink_tokens = 0, first_token = 0;
  const OptionalTensor& key_centres;     // as in CacheTensors
  const OptionalTensor& first_position;  // the same
};

// bf16 rows [rows, num_heads, head_dim] that may lie apart, as slices of a fused tensor do. Throws
// Error unless each is 16-byte aligned and contiguous in itself.
HeadRows head_rows(const Argument& argument, const Extent& rows, const Extent& heads,
                   const Extent& dims, const Tensor& neighbour);

// Throws Error for sizes that make no page.
PageFormat page_format(const char* op, int64_t head_dim, const FormatArguments& format);

// Without o and lse. All tensors lie on the device of the pool.
AttentionParams attention_params(const char* op, const CacheTensors& cache,
                                 const FormatArguments& format, const AttentionTensors& tensors);

AppendParams append_params(const char* op, const CacheTensors& cache, const FormatArguments& format,
                           const AppendTensors& tensors);

HistoryRowsParams history_params(const char* op, const FormatArguments& format,
                                 const HistoryTensors& tensors);

}  // namespace oscar::torch_ops
