// Rows through the INT2 codec and back, without a cache: what a simulation of the cache reads.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "oscar/cache/scale_correction.h"

namespace oscar {

// x, out [batch, num_heads, tokens, head_dim] fp32, contiguous; x holds bf16 numbers. Heads may be
// written in different ways. All pointers in device memory.
struct DequantizeParams {
  const float* x = nullptr;
  float* out = nullptr;
  int64_t batch = 0, tokens = 0;
  int num_heads = 0;
  int head_dim = 0;          // a multiple of 8, at most kMaxHeadDim
  int quant_group_size = 0;  // divides head_dim
  MetadataDtype metadata = MetadataDtype::kFp16;
  const float* clip_ratio = nullptr;    // [num_heads], <= 0: off
  const uint8_t* correction = nullptr;  // [num_heads] ScaleCorrection
  const float* feedback = nullptr;      // [num_heads, head_dim, head_dim] U; null: plain rounding
  const float* metric = nullptr;        // [num_heads, head_dim, head_dim] M; null: no head needs it
  // RowStatus bits of refused rows are or-ed in; their output is unspecified.
  int* status = nullptr;
};

// One launch, no allocation, no waiting: the dequantized rows of quantize_rows, to the bit.
// Returns cudaErrorInvalidValue for sizes that do not fit together.
cudaError_t dequantize_rows(const DequantizeParams& params, cudaStream_t stream);

}  // namespace oscar
