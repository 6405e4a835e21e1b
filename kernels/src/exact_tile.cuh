// Eight tokens of exact bf16 rows: logits, weights and their contribution to the output.
#pragma once

#include "attention_state.cuh"

namespace oscar {

// Makes absent value rows harmless: their weight is zero, but what lies there may be NaN.
template <typename Config>
__device__ __forceinline__ void clear_absent_rows(uint8_t* stage, int valid, int lane) {
  uint32_t* values = reinterpret_cast<uint32_t*>(stage + Config::kExactBytes / 2);
#pragma unroll 1
  for (int i = valid * (Config::kExactRow / 4) + lane; i < Config::kExactBytes / 8; i += 32) {
    values[i] = 0;
  }
  ptx::fence_shared_before_copies();
  __syncwarp();
}

// stage: keys [8][d], then values [8][d], bf16. Row r is visible to column c of this lane when
// r < valid and distance + r <= query_of[c], query_of being the column's query and distance the
// tile's first position minus that of query 0.
template <typename Config>
__device__ __forceinline__ void exact_tile(AttentionState<Config>& s, const uint8_t* stage,
                                           int valid, int distance, const int (&query_of)[2],
                                           float scale_log2, int lane) {
  using Layout = typename Config::Layout;
  constexpr int kRow = Config::kExactRow;
  const int g = lane / 4, t = lane % 4;
  float scores[4] = {};
  const uint4* keys = reinterpret_cast<const uint4*>(stage + g * kRow) + t;
#pragma unroll
  for (int i = 0; i < Config::kTiles / 2; ++i) {
    const uint4 k = keys[4 * i];
    ptx::mma_bf16(scores, k.x, 0, k.y, 0, s.q[2 * i][0], s.q[2 * i][1]);
    ptx::mma_bf16(scores, k.z, 0, k.w, 0, s.q[2 * i + 1][0], s.q[2 * i + 1][1]);
  }
  bool visible[2];
  float p[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) visible[c] = g < valid && distance + g <= query_of[c];
  const auto weigh = [&]() {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float e = scores[c] * scale_log2 - s.reference[c];
      p[c] = visible[c] ? ptx::exp2_approx(e) : 0.0f;
    }
  };
  weigh();
  if (__any_sync(~0u, !(fmaxf(p[0], p[1]) <= kLargestWeight))) {
    const float largest[2] = {visible[0] ? scores[0] * scale_log2 : -INFINITY,
                              visible[1] ? scores[1] * scale_log2 : -INFINITY};
    s.raise_reference(largest);
    weigh();
  }
  s.sum[0] += p[0];
  s.sum[1] += p[1];
  // Two bf16 parts carry the weight to 2^-17; one alone would show in the output. They are the two
  // halves of one operand, against the same values twice.
  const __nv_bfloat162 high = __floats2bfloat162_rn(p[0], p[1]);
  const float2 back = __bfloat1622float2(high);
  const __nv_bfloat162 low = __floats2bfloat162_rn(p[0] - back.x, p[1] - back.y);
  uint32_t bits;
  memcpy(&bits, &high, 4);
  const uint32_t b0 = ptx::movmatrix(bits);
  memcpy(&bits, &low, 4);
  const uint32_t b1 = ptx::movmatrix(bits);
  uint32_t first[Config::kTiles], second[Config::kTiles];  // this lane's values of tokens 2t, + 1
  const uint8_t* values = stage + Config::kExactBytes / 2 + 2 * t * kRow;
#pragma unroll
  for (int run = 0; run < Layout::kValueRuns; ++run) {
    const int at = 2 * Layout::value_run_dim(g, run);
    constexpr int kWords = Layout::kValueRun / 2;
    load_words<2 * Layout::kValueRun>(first + run * kWords, values + at);
    load_words<2 * Layout::kValueRun>(second + run * kWords, values + kRow + at);
  }
#pragma unroll
  for (int m = 0; m < Config::kTiles; ++m) {
    uint32_t a[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) a[h] = __byte_perm(first[m], second[m], h ? 0x7632 : 0x5410);
    ptx::mma_bf16(s.out[m], a[0], a[1], a[0], a[1], b0, b1);
  }
}

}  // namespace oscar
