// The tensors of the operators, checked, as the structs that the CPU twins and the kernels take.
#pragma once

#include <optional>

#include "checks.h"
#include "oscar/cache/page_layout.h"

namespace oscar::torch_ops {

using OptionalTensor = std::optional<Tensor>;

// How codes and metadata lie in a page.
struct FormatArguments {
  int64_t quant_group_size = 0;
  std::optional<ScalarType> metadata_dtype = {};  // none: float16
  bool quartered = false;
};

// The cache of one layer, as both operators see it.
struct CacheTensors {
  Tensor pool;                      // uint8 [num_pages, num_kv_heads, chunk_bytes]
  Tensor kv_indptr;                 // int32 [batch + 1]
  Tensor kv_indices;                // int32 [at least kv_indptr[batch]]
  Tensor window_k, window_v;        // bf16 [slots, num_kv_heads, sink + ring tokens, head_dim]
  OptionalTensor window_slot = {};  // int32 [batch]; none: the request's index
  int64_t sink_tokens = 0;
};

struct AttentionTensors {
  Tensor q;                 // bf16 [batch, q_len, num_qo_heads, head_dim]
  Tensor kv_last_page_len;  // int32 [batch]
  Tensor seq_len;           // int32 [batch]
  double sm_scale = 1.0;
};

struct AppendTensors {
  Tensor k, v;                                      // bf16 [rows, num_kv_heads, head_dim]
  Tensor rows_indptr;                               // int32 [batch + 1]
  Tensor old_len, old_history, new_history;         // int32 [batch]
  Tensor status;                                    // int32 [1]
  OptionalTensor clip_k = {}, clip_v = {};          // float32 [num_kv_heads]
  OptionalTensor feedback_k = {}, feedback_v = {};  // float32 [num_kv_heads, head_dim, head_dim]
  OptionalTensor metric_k = {}, metric_v = {};
};

// Throws Error for sizes that make no page.
PageFormat page_format(const char* op, int64_t head_dim, const FormatArguments& format);

// Without o and lse. All tensors lie on the device of the pool.
AttentionParams attention_params(const char* op, const CacheTensors& cache,
                                 const FormatArguments& format, const AttentionTensors& tensors);

AppendParams append_params(const char* op, const CacheTensors& cache, const FormatArguments& format,
                           const AppendTensors& tensors);

}  // namespace oscar::torch_ops
