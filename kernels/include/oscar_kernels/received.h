// What rows of a sequence receive from sampled queries, as weights of sums (math 2.6).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace oscar {

// Rows [heads, tokens, head_dim] bf16, unit stride in head_dim, 16-byte aligned as the strides are.
struct ReceivedRows {
  const void* rows = nullptr;
  int64_t head_stride = 0, token_stride = 0;  // elements
};

// One sequence, or several of the same length as if they were heads. All pointers in device memory.
struct ReceivedParams {
  int head_dim = 0;  // 64, 80, 96, 128, 192 or 256
  int num_qo_heads = 0, num_kv_heads = 0, tokens = 0;
  int queries = 0;       // that are looked at
  float sm_scale = 1;    // factor on the scores before softmax
  float even_share = 0;  // of a query's weight, spread evenly over the INT2 rows that it reads
  ReceivedRows q, k;     // after RoPE
  // [4, queries], ascending in each row: positions of the queries, the first key that each sees,
  // and its INT2 rows [begin, end), none empty, all visible and before the query.
  const int32_t* reach = nullptr;
  // With p the weight of key t for query i and R_i the query's INT2 rows: the sum over the queries
  // and the heads of a group with t in R_i of the share of p (1 - p), of p^2, and of p.
  float *key = nullptr, *value = nullptr, *attention = nullptr;  // [num_kv_heads, tokens]
  float* query = nullptr;  // [num_qo_heads, queries]: sum over R_i of p (1 - p)
};

// Bytes of workspace, 16-byte aligned; its contents matter only during the call.
size_t received_workspace(const ReceivedParams& params);

// Two launches, no allocation, no waiting. Products of rows are exact and added in fp32, as is all
// else. The same bits whatever lies beside a sequence. Returns cudaErrorNotSupported for a head_dim
// that is not listed or an alignment that the kernel cannot read, cudaErrorInvalidValue for sizes
// that do not fit together.
cudaError_t received_weights(const ReceivedParams& params, void* workspace, cudaStream_t stream);

}  // namespace oscar
