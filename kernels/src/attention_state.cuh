// The running softmax of one warp: 8 kNT columns, all dimensions, on tensor-core fragments.
//
// Lane = 4 g + t. After Q K^T a lane holds logits of tokens (row g, row g + 8) and columns
// (2t, 2t + 1); in the output it holds dimensions (row g, row g + 8 of each tile), same columns.
// Weights are w = 2^(logit - reference) * value_scale. The reference of a column is lazy: it moves
// only when a weight, or a lane's sum of a few, passes kLargestWeight; that keeps w inside fp16.
#pragma once

#include <cuda_bf16.h>

#include "attention_config.cuh"
#include "ptx.cuh"

namespace oscar {

constexpr float kLargestWeight = 32768.0f;
constexpr float kReferenceMargin = 10.0f;  // a new reference puts the largest weight at 2^10
constexpr float kNoReference = -1e30f;     // before any key; finite, so that no NaN arises
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <typename Config>
struct AttentionState {
  static constexpr int kNT = Config::kNT, kTiles = Config::kTiles, kGroups = Config::kGroups;
  float out[kNT][kTiles][4];        // [column tile][row tile][fragment]
  float reference[kNT][2];          // log2 units, columns 2t and 2t + 1
  float sum[kNT][2];                // this lane's part
  float zero_sum[kNT][kGroups][2];  // this lane's part of sum w zero
  // Keys' side, constant over an item.
  uint32_t q[kNT][kTiles][2];    // fp16 operands with 4^-j folded in
  float q_sum[kNT][kGroups][2];  // sums of the same rounded values, times 2^-24
  float logit_factor[kNT][2];    // sm_scale log2(e) 2^(24 - n) of the column

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < kNT; ++n) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[n][m][i] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        reference[n][c] = kNoReference;
        sum[n][c] = 0.0f;
#pragma unroll
        for (int k = 0; k < kGroups; ++k) zero_sum[n][k][c] = 0.0f;
      }
    }
  }

  // Moves the references up to this lane group's largest log2 weights; rescales what was summed.
  __device__ void raise_reference(int n, const float (&largest)[2]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float top = largest[c];
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
      const float moved = fmaxf(reference[n][c], top - kReferenceMargin);
      const float factor = exp2f(reference[n][c] - moved);
      reference[n][c] = moved;
      sum[n][c] *= factor;
#pragma unroll
      for (int k = 0; k < kGroups; ++k) zero_sum[n][k][c] *= factor;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        out[n][m][c] *= factor;
        out[n][m][c + 2] *= factor;
      }
    }
  }
};

// Sum over the eight lanes that share t.
__device__ inline float sum_over_rows(float x) {
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  return x + __shfl_xor_sync(~0u, x, 16);
}

}  // namespace oscar
