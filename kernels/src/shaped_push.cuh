// Products of 32 rows a warp with sixteen columns of a matrix on the tensor cores, in fp32
// precision: what errors push onto later columns, and rows in the metric of attention.
//
// Factors are cut in two fp16 parts of 11 bits; of the four products the smallest, 2^-24 of the
// whole, is left out. Errors are scaled by a power of two a row, matrices by another.
#pragma once

#include "append_rows.cuh"
#include "ptx.cuh"

namespace oscar {

constexpr int kColumns = 16, kWarpRows = 32;
constexpr int kBufferBytes = kWarpRows * kColumns * 4;
constexpr int kPanelBytes = kColumns * kColumns * 4;  // of sixteen matrix rows
// Entries of a factor of a damped metric stay below sqrt(101 d), 161 at most (math 5.1).
constexpr float kFeedbackScale = 16.0f, kLargestFeedback = 4000.0f;

// Quad `quad` (four columns) of row `row`: 16 bytes, in the order in which neither the lanes that
// own rows nor those that hold operands meet in a bank.
__device__ __forceinline__ int quad_offset(int row, int quad) {
  return 64 * row + 16 * (quad ^ (row / 2 & 3));
}

__device__ __forceinline__ uint32_t half_bits(float x0, float x1) {
  const __half2 pair = __floats2half2_rn(x0, x1);
  uint32_t word;
  memcpy(&word, &pair, 4);
  return word;
}

__device__ __forceinline__ float2 half_values(uint32_t bits) {
  __half2 pair;
  memcpy(&pair, &bits, 4);
  return __half22float2(pair);
}

// Four values as two fp16 parts each: (x0, x1), (x2, x3) high, then low.
__device__ __forceinline__ uint4 split_four(float x0, float x1, float x2, float x3) {
  const uint32_t a = half_bits(x0, x1), b = half_bits(x2, x3);
  const float2 a_back = half_values(a), b_back = half_values(b);
  return make_uint4(a, b, half_bits(x0 - a_back.x, x1 - a_back.y),
                    half_bits(x2 - b_back.x, x3 - b_back.y));
}

// What a panel holds: `steps` squares of sixteen rows and columns, the first one at (row, column),
// below each other or side by side.
struct PanelPart {
  int row, column, steps;
  bool side_by_side = false;
};

// A panel of at most kSteps squares on its way from memory to shared memory. A square is an operand
// of the tensor cores: for each lane 16 bytes of high parts, behind them the low parts. Column n of
// the matrix is row n / 2 + n % 2 * 8 of the operand, so that the pairs of columns of a row come
// out side by side.
template <int kHeadDim, int kSteps, int kThreads>
struct Panel {
  static constexpr int kItems = kSteps * 64;  // of four entries of a column
  static constexpr int kPerThread = (kItems + kThreads - 1) / kThreads;
  float entries[kPerThread][4];

  __device__ __forceinline__ void load(const float* matrix, PanelPart part) {
    const float* from = matrix + part.row * kHeadDim + part.column;
    const int stride = part.side_by_side ? kColumns : kColumns * kHeadDim;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = j * kThreads + threadIdx.x;
      const int offset = i / 64 * stride + i / 16 % 4 * 4 * kHeadDim + i % 16;
      if (i < part.steps * 64) {
#pragma unroll
        for (int k = 0; k < 4; ++k) entries[j][k] = __ldg(from + offset + k * kHeadDim);
      }
    }
  }

  // Reports the row as not finite where an entry is beyond `largest`.
  __device__ __forceinline__ void store(PanelPart part, float scale, float largest, uint8_t* panel,
                                        const AppendParams& p) const {
    bool fits = true;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = j * kThreads + threadIdx.x;
      if (i < part.steps * 64) {
        const float(&x)[4] = entries[j];
#pragma unroll
        for (int k = 0; k < 4; ++k) fits &= fabsf(x[k]) <= largest;
        const uint4 parts = split_four(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale);
        const int n = i % 16, quad = i / 16 % 4;
        auto* to = reinterpret_cast<uint32_t*>(panel + i / 64 * kPanelBytes +
                                               (4 * (n / 2) + quad) * 16 + n % 2 * 4);
        to[0] = parts.x, to[2] = parts.y;
        to[kPanelBytes / 8] = parts.z, to[kPanelBytes / 8 + 2] = parts.w;
      }
    }
    if (!fits) report_refused(p, static_cast<int>(RowStatus::kNonFinite));
  }
};

// High or low parts of a square of a panel.
__device__ __forceinline__ uint4 high_parts(const uint8_t* square, int lane) {
  return *reinterpret_cast<const uint4*>(square + 16 * lane);
}
__device__ __forceinline__ uint4 low_parts(const uint8_t* square, int lane) {
  return *reinterpret_cast<const uint4*>(square + kPanelBytes / 2 + 16 * lane);
}

// Errors of sixteen columns of 32 rows: rows 8 j + lane / 4, high and low parts of a quad.
struct ErrorOperand {
  uint4 rows[4];
  __device__ __forceinline__ void load(const uint8_t* buffer, int lane) {
    const uint8_t* from = buffer + quad_offset(lane / 4, lane % 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) rows[j] = *reinterpret_cast<const uint4*>(from + 512 * j);
  }
};

// Sixteen columns of 32 rows: columns 2 g and 2 g + 1 (words 0, 1 and 2, 3) of rows 8 j + 2 t and
// the next one, g = lane / 4, t = lane % 4.
struct RowSums {
  float of[4][4] = {};

  // += rows times the square, of which `parts` are taken, of the rows words 0 and 1 or 2 and 3.
  __device__ __forceinline__ void add(const uint4& parts, const uint4 (&rows)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ptx::mma_f16(of[j], parts.x, parts.y, parts.z, parts.w, rows[j].x, rows[j].y);
    }
  }
  __device__ __forceinline__ void add_low_rows(const uint4& parts, const uint4 (&rows)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ptx::mma_f16(of[j], parts.x, parts.y, parts.z, parts.w, rows[j].z, rows[j].w);
    }
  }
  __device__ __forceinline__ void add(const uint4& parts, const uint2 (&rows)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      ptx::mma_f16(of[j], parts.x, parts.y, parts.z, parts.w, rows[j].x, rows[j].y);
    }
  }
  __device__ __forceinline__ void add(const RowSums& other) {
#pragma unroll
    for (int i = 0; i < 16; ++i) of[i / 4][i % 4] += other.of[i / 4][i % 4];
  }

  // To a buffer in fp32 (quad_offset), added to what is there or in place of it.
  template <bool kAdd>
  __device__ __forceinline__ void store(uint8_t* buffer, int lane) const {
    const int g = lane / 4, t = lane % 4;
    uint8_t* base = buffer + quad_offset(2 * t, g / 2) + g % 2 * 8;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        float2* to = reinterpret_cast<float2*>(base + 512 * j + 64 * next);
        float2 sum = make_float2(of[j][next], of[j][2 + next]);
        if (kAdd) {
          const float2 before = *to;
          sum.x += before.x, sum.y += before.y;
        }
        *to = sum;
      }
    }
  }
};

// The sixteen columns of row `lane` that a buffer holds.
__device__ __forceinline__ void load_row(const uint8_t* buffer, int lane, float (&to)[kColumns]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float4 v = *reinterpret_cast<const float4*>(buffer + quad_offset(lane, c));
    to[4 * c] = v.x, to[4 * c + 1] = v.y, to[4 * c + 2] = v.z, to[4 * c + 3] = v.w;
  }
}

}  // namespace oscar
