// Rows of q, k and v into the basis of the cache on the GPU, and of o out of it.
#pragma once

#include <cuda_runtime_api.h>

#include "oscar/cache/pages.h"

namespace oscar {

// Whether the sizes of a call fit together: head_dim 64, 128 or 256, at most 16 heads a KV head,
// strides that are multiples of 8 elements.
bool valid_transform(const TransformParams& params);

// All tensors of the call in one launch; all pointers in device memory, 16-byte aligned. Products
// are fused into sums in fp32, in another order than transform_ref adds; one rounding to bf16 at
// the end. The same inputs give the same bits, whatever other rows the call has. From sm_90 on the
// launch begins before the kernel directly ahead of it in the stream has ended, and reads only the
// matrices until then, which that kernel therefore must not write. No allocation, no waiting;
// without rows nothing is launched. Returns cudaErrorInvalidValue where !valid_transform(params).
cudaError_t transform_rows(const TransformParams& params, cudaStream_t stream);

}  // namespace oscar
