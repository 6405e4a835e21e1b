// The factor that corrects a row's scale in the metric of attention, a row a lane.
#pragma once

#include "oscar/cache/scale_correction.h"
#include "shaped_push.cuh"

namespace oscar {

// f = (x M x^T) / (x M y^T) for this thread's row x, y its dequantized codes (word w of the row at
// codes[w * pitch]). Products and sums are rounded one by one, ascending, as the codec defines
// them: a bit of f decides how a scale rounds. `panel`: kHeadDim * 16 floats of shared memory that
// the block no longer needs; all its threads take part.
template <int kHeadDim>
__device__ __forceinline__ float metric_scale(const uint16_t* x, const float* metric,
                                              const uint32_t* codes, int pitch,
                                              const ScaleZero* scales, int group_size,
                                              float* panel) {
  const auto value = [](uint32_t pair, int i) {
    return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
  };
  float num = 0.0f, den = 0.0f;
#pragma unroll 1
  for (int column = 0; column < kHeadDim; column += kColumns) {
    __syncthreads();
    for (int i = threadIdx.x; i < kHeadDim * kColumns / 4; i += blockDim.x) {
      const int row = i / 4, at = i % 4 * 4;
      *reinterpret_cast<float4*>(panel + row * kColumns + at) =
          __ldg(reinterpret_cast<const float4*>(metric + row * kHeadDim + column + at));
    }
    __syncthreads();
    float weighted[kColumns] = {};  // columns of x M
#pragma unroll 1
    for (int j = 0; j < kHeadDim; j += 8) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(x + j));
      const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float factor = value(pairs[i / 2], i);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          weighted[c] = add_rn(weighted[c], mul_rn(factor, panel[(j + i) * kColumns + c]));
        }
      }
    }
    const ScaleZero sz = scales[column / group_size];
    const uint32_t word = codes[column / kColumns * pitch];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const uint32_t pair = reinterpret_cast<const uint32_t*>(x + column)[c / 2];
      num = add_rn(num, mul_rn(weighted[c], value(pair, c)));
      den = add_rn(den, mul_rn(weighted[c], dequantize(word >> (2 * c) & 3, sz)));
    }
  }
  return correction_factor(num, den);
}

}  // namespace oscar
