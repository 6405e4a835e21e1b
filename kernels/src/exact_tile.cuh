// 16 tokens of exact bf16 rows: logits from the key tile, then the value tile into the output.
#pragma once

#include "attention_state.cuh"

namespace oscar {

// Weights of a tile between its key half and its value half: bf16 high and low parts.
template <typename Config>
struct ExactWeights {
  uint32_t high[Config::kNT][2], low[Config::kNT][2];
};

// keys: [16] rows of kExactPitch bytes in shared memory; q: [kColumns] rows of the same pitch.
// Row r is visible to column c when r < valid and distance + r <= query_of[c], query_of being the
// query index of this lane's columns and distance the tile's first position minus that of query 0.
template <typename Config>
__device__ __forceinline__ void exact_keys(AttentionState<Config>& s, const uint8_t* keys,
                                           const uint8_t* q, int valid, int distance,
                                           const int (&query_of)[Config::kNT][2], float scale_log2,
                                           int lane, ExactWeights<Config>& weights) {
  constexpr int kNT = Config::kNT, kPitch = Config::kExactPitch;
  const int g = lane / 4, matrix = lane / 8, row = lane % 8;
  float scores[kNT][4] = {};
  const uint32_t key_address =
      ptx::shared_address(keys) + (row + matrix % 2 * 8) * kPitch + matrix / 2 * 16;
  const uint32_t q_address = ptx::shared_address(q) + row * kPitch + matrix * 16;
#pragma unroll
  for (int k = 0; k < Config::kTiles; k += 2) {
    uint32_t a[4], b[4], columns[kNT][4];
    ptx::ldmatrix_x4(a, key_address + 32 * k);
    ptx::ldmatrix_x4(b, key_address + 32 * k + 32);
#pragma unroll
    for (int n = 0; n < kNT; ++n) {
      ptx::ldmatrix_x4(columns[n], q_address + 8 * n * kPitch + 32 * k);
      ptx::mma_bf16(scores[n], a[0], a[1], a[2], a[3], columns[n][0], columns[n][1]);
      ptx::mma_bf16(scores[n], b[0], b[1], b[2], b[3], columns[n][2], columns[n][3]);
    }
  }
  float p[kNT][4];
  const auto weigh = [&]() {
    float top = 0.0f;
#pragma unroll
    for (int n = 0; n < kNT; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = g + 8 * (i / 2);
        const bool visible = r < valid && distance + r <= query_of[n][i % 2];
        const float e = scores[n][i] * scale_log2 - s.reference[n][i % 2];
        p[n][i] = visible ? ptx::exp2_approx(e) : 0.0f;
        top = fmaxf(top, p[n][i]);
      }
    }
    return top;
  };
  if (__any_sync(~0u, !(weigh() <= kLargestWeight))) {
#pragma unroll
    for (int n = 0; n < kNT; ++n) {
      float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = g + 8 * (i / 2);
        if (r < valid && distance + r <= query_of[n][i % 2]) {
          largest[i % 2] = fmaxf(largest[i % 2], scores[n][i] * scale_log2);
        }
      }
      s.raise_reference(n, largest);
    }
    weigh();
  }
#pragma unroll
  for (int n = 0; n < kNT; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float p0 = p[n][2 * half], p1 = p[n][2 * half + 1];
      s.sum[n][0] += p0;
      s.sum[n][1] += p1;
      // Two bf16 parts carry the weight to 2^-17; one alone would show in the output.
      const __nv_bfloat162 high = __floats2bfloat162_rn(p0, p1);
      const float2 back = __bfloat1622float2(high);
      const __nv_bfloat162 low = __floats2bfloat162_rn(p0 - back.x, p1 - back.y);
      uint32_t bits;
      memcpy(&bits, &high, 4);
      weights.high[n][half] = ptx::movmatrix(bits);
      memcpy(&bits, &low, 4);
      weights.low[n][half] = ptx::movmatrix(bits);
    }
  }
}

template <typename Config>
__device__ __forceinline__ void exact_values(AttentionState<Config>& s, const uint8_t* values,
                                             int lane, const ExactWeights<Config>& weights) {
  constexpr int kPitch = Config::kExactPitch;
  const int matrix = lane / 8, row = lane % 8;
  // Matrices: (tokens 0-7, dims 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15); transposed on load.
  const uint32_t address =
      ptx::shared_address(values) + (row + matrix / 2 * 8) * kPitch + matrix % 2 * 16;
#pragma unroll
  for (int m = 0; m < Config::kTiles; ++m) {
    uint32_t a[4];
    ptx::ldmatrix_x4_trans(a, address + 32 * m);
#pragma unroll
    for (int n = 0; n < Config::kNT; ++n) {
      ptx::mma_bf16(s.out[n][m], a[0], a[1], a[2], a[3], weights.high[n][0], weights.high[n][1]);
      ptx::mma_bf16(s.out[n][m], a[0], a[1], a[2], a[3], weights.low[n][0], weights.low[n][1]);
    }
  }
}

}  // namespace oscar
