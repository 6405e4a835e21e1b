// Rows through the INT2 codec and back, without a cache: what a simulation of the cache reads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "oscar/cache/pages.h"

namespace oscar {

// x, out [batch, num_heads, tokens, head_dim] fp32, contiguous; x holds bf16 numbers. Heads may be
// written in different ways. All pointers in device memory.
struct DequantizeParams {
  const float* x = nullptr;
  float* out = nullptr;
  int64_t batch = 0, tokens = 0;
  int num_heads = 0;
  int head_dim = 0;  // a multiple of 8, at most kMaxHeadDim
  RowFormat format = {};
  SideWriter writer = {};  // of num_heads heads; plain under other rules than this toolkit's
  // RowStatus bits of refused rows are or-ed in; their output is unspecified.
  int* status = nullptr;
};

// One launch, no allocation, no waiting: the dequantized rows of quantize_rows, to the bit.
// Returns cudaErrorInvalidValue for sizes that do not fit together.
cudaError_t dequantize_rows(const DequantizeParams& params, cudaStream_t stream);

}  // namespace oscar
