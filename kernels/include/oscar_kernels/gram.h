// Sums of x^T x and of x over bf16 rows, in float64: the calibration statistics on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace oscar {

// Rows of one tensor [batch, num_heads, tokens, head_dim] bf16 (unit stride in head_dim), and the
// sums that they are added to. num_heads is a multiple of num_kv_heads; heads h g .. h g + g - 1
// belong to KV head h. All pointers in device memory.
struct GramRows {
  const void* rows = nullptr;  // 16-byte aligned, and so are the strides
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;  // elements
  int batch = 0, num_heads = 0, tokens = 0;
  double* moment = nullptr;  // [num_kv_heads, head_dim, head_dim] += sum of x^T x
  double* sum = nullptr;     // [num_kv_heads, head_dim] += sum of x
};

constexpr int kMaxGramTensors = 4;

struct GramParams {
  int head_dim = 0;  // 64, 80, 96, 128, 192 or 256
  int num_kv_heads = 0;
  int num_tensors = 0;
  GramRows tensors[kMaxGramTensors] = {};
};

// Bytes of workspace for this call on the current device. Returns cudaErrorNotSupported for a
// head_dim that is not listed or an alignment that the kernel cannot read, cudaErrorInvalidValue
// for sizes that do not fit together.
cudaError_t gram_workspace(const GramParams& params, size_t* bytes);

// Adds the sums of all tensors and KV heads: two launches, no allocation, no waiting. Products are
// exact; 128 of them at a time are added in fp32 by the tensor cores, everything above that with
// compensation or in float64: relative error (Frobenius) below 5e-7. How sequences are batched
// does not change which rows are added together in fp32. The same call on the same device gives the
// same bits. A moment stays exactly symmetric. |x|^2 has to lie in the range of fp32: beyond 2^63
// the sum is not finite. The workspace is 16-byte aligned; its contents matter only during the
// call.
cudaError_t gram_add(const GramParams& params, void* workspace, size_t workspace_bytes,
                     cudaStream_t stream);

}  // namespace oscar
