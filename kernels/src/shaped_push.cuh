// What the errors of earlier columns push onto sixteen later ones, for 32 rows a warp: a product
// with the feedback matrix on the tensor cores, in fp32 precision.
//
// Both factors are cut in two fp16 parts of 11 bits; of the four products the smallest, 2^-24 of
// the whole, is left out. Errors are scaled by a power of two a row, matrix entries by
// kFeedbackScale.
#pragma once

#include "ptx.cuh"
#include "row_codec.cuh"

namespace oscar {

constexpr int kColumns = 16, kWarpRows = 32;
constexpr int kSlotBytes = kWarpRows * kColumns * 4;
constexpr int kPanelBytes = kColumns * kColumns * 4;
// Entries of a factor of a damped metric stay below sqrt(101 d), 161 at most.
constexpr float kFeedbackScale = 16.0f, kLargestFeedback = 4000.0f;

// Chunk `chunk` (four columns) of row `row`: 16 bytes, in the order in which neither the lanes that
// own rows nor those that hold operands meet in a bank.
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return (4 * row + (chunk ^ (row / 2 & 3))) * 16;
}

// Four values as two fp16 parts each: (x0, x1), (x2, x3) high, then low.
__device__ __forceinline__ uint4 split_four(float x0, float x1, float x2, float x3) {
  const auto bits = [](__half2 pair) {
    uint32_t word;
    memcpy(&word, &pair, 4);
    return word;
  };
  const __half2 a = __floats2half2_rn(x0, x1), b = __floats2half2_rn(x2, x3);
  const float2 a_back = __half22float2(a), b_back = __half22float2(b);
  return make_uint4(bits(a), bits(b), bits(__floats2half2_rn(x0 - a_back.x, x1 - a_back.y)),
                    bits(__floats2half2_rn(x2 - b_back.x, x3 - b_back.y)));
}

// A block's part of columns [column, column + 16) of a matrix, on its way from memory to shared
// memory: rows [0, column) become operands, the square on the diagonal stays fp32.
template <int kHeadDim, int kThreads>
struct FeedbackColumns {
  static constexpr int kItems = (kHeadDim / kColumns - 1) * 64;  // of four entries, at most
  static constexpr int kPerThread = (kItems + kThreads - 1) / kThreads;
  float entries[kPerThread][4];
  float4 diagonal;

  __device__ __forceinline__ void load(const float* matrix, int column) {
    if (threadIdx.x < kColumns * kColumns / 4) {
      const int row = column + threadIdx.x / 4, at = column + threadIdx.x % 4 * 4;
      diagonal = __ldg(reinterpret_cast<const float4*>(matrix + row * kHeadDim + at));
    }
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = j * kThreads + threadIdx.x, n = i % 16, chunk = i / 16 % 4, step = i / 64;
      if (i >= column * 4) break;
      const float* from = matrix + (16 * step + 4 * chunk) * kHeadDim + column + n;
#pragma unroll
      for (int k = 0; k < 4; ++k) entries[j][k] = __ldg(from + k * kHeadDim);
    }
  }

  // Returns false in a thread that met an entry beyond kLargestFeedback.
  __device__ __forceinline__ bool store(int column, uint8_t* panel, float* square) const {
    bool fits = true;
    if (threadIdx.x < kColumns * kColumns / 4) {
      reinterpret_cast<float4*>(square)[threadIdx.x] = diagonal;
    }
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = j * kThreads + threadIdx.x, n = i % 16, chunk = i / 16 % 4, step = i / 64;
      if (i >= column * 4) break;
      const float(&x)[4] = entries[j];
#pragma unroll
      for (int k = 0; k < 4; ++k) fits &= fabsf(x[k]) <= kLargestFeedback;
      *reinterpret_cast<uint4*>(panel + step * kPanelBytes + chunk_offset(n, chunk)) =
          split_four(x[0] * kFeedbackScale, x[1] * kFeedbackScale, x[2] * kFeedbackScale,
                     x[3] * kFeedbackScale);
    }
    return fits;
  }
};

// Sums over the errors in slots [0, steps) times the panel; to[row][16] (chunk_offset) holds fp32.
// `to` may be one of the slots.
__device__ __forceinline__ void push_errors(const uint8_t* slots, const uint8_t* panel, int steps,
                                            uint8_t* to, int lane) {
  const int g = lane / 4, t = lane % 4;
  // [product][rows 16 m + .][columns 8 n + .]: products apart, or each would wait for the others.
  float sums[3][2][2][4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    uint4 b[2];  // (k low, k high) of the high parts, then of the low parts
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      b[n] =
          *reinterpret_cast<const uint4*>(panel + step * kPanelBytes + chunk_offset(8 * n + g, t));
    }
    const uint8_t* rows = slots + step * kSlotBytes;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint4 near = *reinterpret_cast<const uint4*>(rows + chunk_offset(16 * m + g, t));
      const uint4 far = *reinterpret_cast<const uint4*>(rows + chunk_offset(16 * m + 8 + g, t));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        ptx::mma_f16(sums[0][m][n], near.z, far.z, near.w, far.w, b[n].x, b[n].y);
        ptx::mma_f16(sums[1][m][n], near.x, far.x, near.y, far.y, b[n].z, b[n].w);
        ptx::mma_f16(sums[2][m][n], near.x, far.x, near.y, far.y, b[n].x, b[n].y);
      }
    }
  }
  const auto total = [&](int m, int n, int i) {
    return sums[0][m][n][i] + sums[1][m][n][i] + sums[2][m][n][i];
  };
  __syncwarp();
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<float2*>(to + chunk_offset(16 * m + 8 * h + g, 2 * n + t / 2) +
                                   t % 2 * 8) =
            make_float2(total(m, n, 2 * h), total(m, n, 2 * h + 1));
      }
    }
  }
  __syncwarp();
}

}  // namespace oscar
