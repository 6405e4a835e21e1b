// The factors that correct the scales of 32 rows a warp in the metric of attention.
#pragma once

#include "oscar/cache/codec.h"
#include "row_scales.cuh"
#include "shaped_push.cuh"

namespace oscar {

// f = (x M x^T) / (x M y^T), y the dequantized row x. x M comes from the tensor cores in fp32
// precision: x is exact in fp16, M is cut in two parts. Sums are not those of the codec's
// definition, which is as far from the exact factor: scales differ by a unit in the last place now
// and then.
template <int kHeadDim, int kThreads>
struct MetricScale {
  static constexpr int kBlocks = kHeadDim / kColumns, kSteps = kBlocks / 2;  // a panel, half of M
  static constexpr int kPanel = kSteps * kPanelBytes;
  static constexpr float kLargest = 65000.0f;

  // A power of two that brings the largest entry of the diagonal, which no other entry of a metric
  // exceeds, to [2^12, 2^13).
  __device__ static __forceinline__ float matrix_scale(const float* metric) {
    float largest = 0.0f;
    for (int i = threadIdx.x % 32; i < kHeadDim; i += 32) {
      largest = fmaxf(largest, __ldg(metric + i * (kHeadDim + 1)));
    }
    for (int step = 1; step < 32; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
    return largest > 0.0f ? __uint_as_float(min(12 - exponent + 127, 254) << 23) : 1.0f;
  }

  // The factor of row `lane` of the warp. row_at(i): row i of the warp; up: a power of
  // two a row with which it fits fp16; codes: word w of row `lane` at codes[w * pitch]; scales: of
  // that row; panels: two of kPanel bytes, which the block no longer needs; buffer: kBufferBytes of
  // the warp. All threads of the block take part; warps that are not busy only bring panels.
  template <typename RowAt>
  __device__ static __forceinline__ float factor(const RowAt& row_at, const float* metric, float up,
                                                 const uint32_t* codes, int pitch,
                                                 const ScaleZero* scales, int group_size,
                                                 uint8_t* panels, uint8_t* buffer, bool busy,
                                                 const AppendParams& p) {
    const int lane = threadIdx.x % 32;
    const float scale = matrix_scale(metric);
    uint2 x[kBlocks][4];  // columns 4 t .. 4 t + 3 of each block, rows g + 8 j
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const __nv_bfloat162 factor2 = __float2bfloat162_rn(__shfl_sync(~0u, up, lane / 4 + 8 * j));
      if (!busy) continue;
      const CodedRow from = row_at(lane / 4 + 8 * j);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const uint2 raw = from.four(b * (kColumns / 4) + lane % 4);
        const float2 low = __bfloat1622float2(__hmul2(as_bf162(raw.x), factor2));
        const float2 high = __bfloat1622float2(__hmul2(as_bf162(raw.y), factor2));
        x[b][j] = make_uint2(half_bits(low.x, low.y), half_bits(high.x, high.y));
      }
    }
    Panel<kHeadDim, kSteps, kThreads> next;
    const auto part = [](int stage) {
      return PanelPart{stage % 2 * kSteps * kColumns, stage / 2 * kColumns, kSteps};
    };
    const float largest = kLargest / scale;
    const CodedRow own = row_at(lane);
    Sums sums;
    next.load(metric, part(0));
    __syncthreads();  // the panels are free
    next.store(part(0), scale, largest, panels, p);
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      RowSums weighted, small;  // apart, or the small products would round away
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        __syncthreads();  // this panel is there, the other one free
        const int stage = 2 * block + half;
        const bool more = stage + 1 < 2 * kBlocks;
        if (more) next.load(metric, part(stage + 1));
        if (busy) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            const uint8_t* square = panels + half * kPanel + step * kPanelBytes;
            small.add(low_parts(square, lane), x[half * kSteps + step]);
            weighted.add(high_parts(square, lane), x[half * kSteps + step]);
          }
        }
        if (more) next.store(part(stage + 1), scale, largest, panels + (1 - half) * kPanel, p);
      }
      if (busy) {
        weighted.add(small);
        weighted.store<false>(buffer, lane);
        __syncwarp();
        sums.add(buffer, lane, {own.eight(2 * block), own.eight(2 * block + 1)},
                 codes[block * pitch], scales[block * kColumns / group_size]);
        __syncwarp();
      }
    }
    return correction_factor(sums.num, sums.den);
  }

 private:
  // x M x^T and x M y^T, a row a lane.
  struct Sums {
    float num = 0.0f, den = 0.0f;

    __device__ __forceinline__ void add(const uint8_t* buffer, int lane, const uint4 (&x)[2],
                                        uint32_t word, ScaleZero sz) {
      float weighted[kColumns];
      load_row(buffer, lane, weighted);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const uint32_t pair = reinterpret_cast<const uint32_t*>(x)[c / 2];
        const float value = __uint_as_float(c % 2 ? pair & 0xffff0000u : pair << 16);
        // A code in the low bits of a mantissa; the power of four is taken back exactly.
        const uint32_t bits = c < 8 ? word : word >> 16;
        const float raised = __uint_as_float(0x4b000000u | (bits & (3u << (2 * (c % 8)))));
        const float unit = 1.0f / (1 << (2 * (c % 8)));
        const float code = fmaf(raised, unit, -8388608.0f * unit);
        num = fmaf(weighted[c], value, num);
        den = fmaf(weighted[c], (code - sz.zero) * sz.scale, den);
      }
    }
  };
};

}  // namespace oscar
