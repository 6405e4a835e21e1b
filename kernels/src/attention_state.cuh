// The running softmax of one warp: eight columns, all dimensions, on tensor-core fragments.
//
// Lane = 4 g + t. After Q K^T a lane holds logits of tokens (row g, row g + 8) and columns
// (2t, 2t + 1); in the output it holds the dimensions value_dim(g, .) of the same columns.
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
  static constexpr int kTiles = Config::kTiles, kGroups = Config::kGroups;
  float out[kTiles][4];            // [row tile][(dim 2m, dim 2m + 1) x (column 2t, 2t + 1)]
  float reference[2];              // log2 units, columns 2t and 2t + 1
  float sum[2];                    // this lane's part
  float zero_sum[kGroups][4];      // sum w zero; from the tensor core, or this lane's part
  uint32_t q[kTiles][2];           // operands of the item: fp16 for codes, bf16 for exact rows
  float logit_factor;              // sm_scale log2(e) 2^(24 - n)
  uint32_t zero_queries[kGroups];  // operands of -sum q 2^-24, against zeros
  float q_sum[kGroups][2];         // or in fp32, where zeros are not fp16
  // What the page's key centers add to logits, log2 units: the mean of the two, and half of what
  // the first has more than the second, of columns 2t and 2t + 1. In shared memory: registers are
  // short.
  const float4* center_logits;

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[m][i] = 0.0f;
    }
    reference[0] = reference[1] = kNoReference;
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) zero_sum[k][i] = 0.0f;
    }
  }

  // Moves the references up to the columns' largest log2 weights; rescales what was summed.
  __device__ void raise_reference(const float (&largest)[2]) {
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float top = largest[c];
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
      if constexpr (Config::kPairedTiles) top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float moved = fmaxf(reference[c], top - kReferenceMargin);
      factor[c] = ptx::exp2_approx(reference[c] - moved);
      reference[c] = moved;
      sum[c] *= factor[c];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k) zero_sum[k][i] *= factor[i % 2];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) out[m][i] *= factor[i % 2];
    }
  }
};

// Sum over the eight lanes that share t, and those of the other tile.
template <typename Config>
__device__ inline float sum_over_rows(float x) {
  x += __shfl_xor_sync(~0u, x, 4);
  x += __shfl_xor_sync(~0u, x, 8);
  x += __shfl_xor_sync(~0u, x, 16);
  return Config::kPairedTiles ? x + __shfl_xor_sync(~0u, x, 2) : x;
}

// kBytes (a multiple of 4) from `from`, aligned to min(kBytes, 16), as words.
template <int kBytes>
__device__ __forceinline__ void load_words(uint32_t* words, const uint8_t* from) {
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 v = reinterpret_cast<const uint4*>(from)[i];
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  } else if constexpr (kBytes == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = *reinterpret_cast<const uint32_t*>(from);
  }
}

}  // namespace oscar
