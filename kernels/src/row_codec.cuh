// The row codec on the GPU: four lanes hold one row of bf16 values, a quarter each.
#pragma once

#include <cuda_bf16.h>

#include "oscar/cache/codec.h"
#include "oscar/cache/pages.h"

namespace oscar {

__device__ inline __nv_bfloat162 as_bf162(uint32_t bits) {
  __nv_bfloat162 value;
  memcpy(&value, &bits, 4);
  return value;
}

// Two values of a row less those of its center, rounded as around_center() does: where a difference
// does not fit fp32, its operands lie so far apart that rounding it once or twice is the same.
__device__ inline uint32_t pair_around(uint32_t pair, uint32_t center) {
  const __nv_bfloat162 difference = __hsub2(as_bf162(pair), as_bf162(center));
  uint32_t bits;
  memcpy(&bits, &difference, 4);
  return bits;
}

// Lane t (0..3) of a row holds dimensions [t d/4, (t + 1) d/4), two to a word.
template <int kHeadDim>
struct QuarterRow {
  static constexpr int kPairs = kHeadDim / 8;
  uint32_t pair[kPairs];

  __device__ void load(const uint16_t* row, int t) {
    const uint4* from = reinterpret_cast<const uint4*>(row + t * (kHeadDim / 4));
#pragma unroll
    for (int i = 0; i < kPairs / 4; ++i) {
      const uint4 v = from[i];
      pair[4 * i] = v.x, pair[4 * i + 1] = v.y, pair[4 * i + 2] = v.z, pair[4 * i + 3] = v.w;
    }
  }
  // Less a center [kHeadDim], rounded as around_center() does.
  __device__ void subtract(const uint16_t* center, int t) {
    QuarterRow o;
    o.load(center, t);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pair[i] = pair_around(pair[i], o.pair[i]);
  }
  __device__ float value(int i) const {
    return __uint_as_float(i % 2 ? pair[i / 2] & 0xffff0000u : pair[i / 2] << 16);
  }
};

// Over the four lanes of a row.
__device__ inline uint32_t row_max(uint32_t x) {
  x = max(x, __shfl_xor_sync(~0u, x, 1));
  return max(x, __shfl_xor_sync(~0u, x, 2));
}
// Largest magnitude of the row as a bf16 pattern; above 0x7f7f the row is not finite.
template <int kHeadDim>
__device__ inline uint32_t largest_pattern(const QuarterRow<kHeadDim>& x) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < x.kPairs; ++i) {
    top = max(top, max(x.pair[i] & 0x7fffu, x.pair[i] >> 16 & 0x7fffu));
  }
  return row_max(top);
}

// The bf16 pattern whose rank among the row's magnitudes is `rank`: the smallest pattern m with
// more than `rank` magnitudes <= m, by bisection on patterns. top: a bound of it. All lanes of the
// warp take part.
template <int kHeadDim>
__device__ inline uint32_t pattern_of_rank(const QuarterRow<kHeadDim>& x, int rank, uint32_t top) {
  // Counts are exact in bf16 up to 256.
  const __nv_bfloat16 bound = __int2bfloat16_rn(rank);
  const auto more_up_to = [&](uint32_t limit) {
    const __nv_bfloat162 limits = as_bf162(limit | limit << 16);
    __nv_bfloat162 count[4];
#pragma unroll
    for (int i = 0; i < x.kPairs; ++i) {
      const __nv_bfloat162 one = __hle2(__habs2(as_bf162(x.pair[i])), limits);
      count[i % 4] = i < 4 ? one : __hadd2(count[i % 4], one);
    }
    __nv_bfloat162 sum = __hadd2(__hadd2(count[0], count[1]), __hadd2(count[2], count[3]));
    sum = __hadd2(sum, __shfl_xor_sync(~0u, sum, 1));
    sum = __hadd2(sum, __shfl_xor_sync(~0u, sum, 2));
    return __hgt(__hadd(__low2bfloat16(sum), __high2bfloat16(sum)), bound);
  };
  // The answer is in [low, high]. It is mostly within an octave of the top: look there first, and
  // twice as far each time that it was not.
  uint32_t low = 0, high = top, reach = 0x80;
  do {
    const uint32_t guess = top > reach ? top - reach : 0;
    const bool below = more_up_to(guess);  // the answer is the guess or less
    if (low == 0) (below ? high : low) = below ? guess : guess + 1;
    reach *= 4;
  } while (__any_sync(~0u, low == 0 && high > 0));
  while (__any_sync(~0u, low < high)) {
    const uint32_t middle = (low + high) / 2;
    const bool below = more_up_to(middle);
    if (low < high) (below ? high : low) = below ? middle : middle + 1;
  }
  return high;
}

// Scale and zero of this lane's quantization group. Returns the RowStatus bits of the row.
template <int kHeadDim>
__device__ inline int row_scale_zero(const QuarterRow<kHeadDim>& x, const PageFormat& format,
                                     const RowRecipe& recipe, ScaleZero& sz) {
  const uint32_t top = largest_pattern(x);
  const int rank = clip_threshold_index(recipe.clip_ratio, kHeadDim);
  const uint32_t limit = rank < 0 ? top : pattern_of_rank(x, rank, min(top, 0x7f7fu));
  __nv_bfloat162 low2 = as_bf162(x.pair[0]), high2 = low2;
#pragma unroll
  for (int i = 1; i < x.kPairs; ++i) {
    low2 = __hmin2(low2, as_bf162(x.pair[i]));
    high2 = __hmax2(high2, as_bf162(x.pair[i]));
  }
  const float2 lows = __bfloat1622float2(low2), highs = __bfloat1622float2(high2);
  float low = fminf(lows.x, lows.y), high = fmaxf(highs.x, highs.y);
  const int lanes = 4 * format.rows.quant_group_size / kHeadDim;  // that share a group
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float other_low = __shfl_xor_sync(~0u, low, step);
    const float other_high = __shfl_xor_sync(~0u, high, step);
    if (step < lanes) {
      low = fminf(low, other_low);
      high = fmaxf(high, other_high);
    }
  }
  const float threshold = __uint_as_float(limit << 16);
  low = fminf(fmaxf(low, -threshold), threshold);  // clamping commutes with min and max
  high = fminf(fmaxf(high, -threshold), threshold);
  sz = scale_and_zero(format.rows, low, high);
  int refused = top > 0x7f7fu ? static_cast<int>(RowStatus::kNonFinite) : 0;
  if (!refused && (!is_finite(sz.scale) || !is_finite(sz.zero))) {
    refused = static_cast<int>(RowStatus::kMetadataOverflow);
  }
  refused |= __shfl_xor_sync(~0u, refused, 1);
  return refused | __shfl_xor_sync(~0u, refused, 2);
}

// Codes of this lane's values, dimension i of the quarter at bits 2 (i % 16) of word i / 16.
template <int kHeadDim>
__device__ inline void plain_codes(const QuarterRow<kHeadDim>& x, ScaleZero sz,
                                   uint32_t (&codes)[kHeadDim / 64]) {
  __nv_bfloat162 bound[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const uint32_t bits = bf16_from_below(code_threshold(k + 1, sz));
    bound[k] = as_bf162(bits | bits << 16);
  }
#pragma unroll
  for (int w = 0; w < kHeadDim / 64; ++w) {
    uint32_t half[2] = {};  // dimensions 2 i and 2 i + 1 of eight at bits 4 i and 16 + 4 i
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const __nv_bfloat162 pair = as_bf162(x.pair[8 * w + i]);
      const uint32_t one = __hge2_mask(pair, bound[0]), two = __hge2_mask(pair, bound[1]);
      const uint32_t three = __hge2_mask(pair, bound[2]);
      const uint32_t bit = 0x00010001u << (4 * (i % 4));
      half[i / 4] |= ((one ^ two ^ three) & bit) | (two & (2 * bit));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) half[h] |= half[h] >> 14;
    codes[w] = __byte_perm(half[0], half[1], 0x5410);
  }
}

// Stores this lane's part of a row: kHeadDim / 4 codes, two bits each, in `codes` (dimension i of
// the quarter at bits 2 (i % 16) of word i / 16).
template <int kHeadDim>
__device__ inline void store_codes(const uint32_t (&codes)[kHeadDim / 64], uint8_t* row, int t) {
  constexpr int kWords = kHeadDim / 64;
#pragma unroll
  for (int w = 0; w < kWords; ++w) reinterpret_cast<uint32_t*>(row)[t * kWords + w] = codes[w];
}

}  // namespace oscar
