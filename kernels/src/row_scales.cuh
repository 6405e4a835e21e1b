// Scales and zeros of 32 rows a warp, for shaped rounding.
#pragma once

#include "append_rows.cuh"
#include "magnitude_planes.cuh"

namespace oscar {

// Several lanes share a row while it is read: 32 values each, eight from every quarter of it.
template <int kHeadDim>
struct RowReader {
  static constexpr int kLanes = kHeadDim / 32, kRows = 32 / kLanes;  // lanes a row, rows at once
  uint32_t words[16];

  __device__ __forceinline__ void load(const CodedRow& row, int part) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const uint4 v = row.plain_eight(quarter * kLanes + part);
      words[4 * quarter] = v.x, words[4 * quarter + 1] = v.y;
      words[4 * quarter + 2] = v.z, words[4 * quarter + 3] = v.w;
    }
  }
  // Makes what was loaded what is coded; apart, so that nothing waits for the loads before.
  __device__ __forceinline__ void around(const CodedRow& row, int part) {
    if (!row.centered()) return;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      uint32_t* at = words + 4 * quarter;
      const uint4 v = row.around(make_uint4(at[0], at[1], at[2], at[3]), quarter * kLanes + part);
      at[0] = v.x, at[1] = v.y, at[2] = v.z, at[3] = v.w;
    }
  }

  // (-smallest, largest) of this lane's values of a quarter; NaN if one of them is.
  __device__ __forceinline__ uint32_t range(int quarter) const {
    __nv_bfloat162 low = as_bf162(words[4 * quarter]), high = low;
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      low = __hmin2_nan(low, as_bf162(words[4 * quarter + i]));
      high = __hmax2_nan(high, as_bf162(words[4 * quarter + i]));
    }
    const uint32_t lows = bits_of(low) ^ 0x80008000u, highs = bits_of(high);
    return wider(__byte_perm(lows, highs, 0x5410), __byte_perm(lows, highs, 0x7632));
  }

  __device__ static __forceinline__ uint32_t wider(uint32_t a, uint32_t b) {
    return bits_of(__hmax2_nan(as_bf162(a), as_bf162(b)));
  }
  __device__ static __forceinline__ uint32_t bits_of(__nv_bfloat162 pair) {
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
  }
};

// Ranges of the four quarters over the lanes of a row; each lane stores its share of them.
template <int kHeadDim>
__device__ __forceinline__ void store_ranges(uint32_t (&range)[4], int part, uint32_t* to) {
  using Reader = RowReader<kHeadDim>;
  const auto join = [&](uint32_t keep, uint32_t send, int step) {
    return Reader::wider(keep, __shfl_xor_sync(~0u, send, step));
  };
  const bool odd = part & 1;
  range[0] = join(odd ? range[2] : range[0], odd ? range[0] : range[2], 1);
  range[1] = join(odd ? range[3] : range[1], odd ? range[1] : range[3], 1);
  if constexpr (kHeadDim == 64) {
    *reinterpret_cast<uint2*>(to + 2 * part) = make_uint2(range[0], range[1]);
  } else {
    const bool second = part & 2;
    range[0] = join(second ? range[1] : range[0], second ? range[0] : range[1], 2);
    if constexpr (kHeadDim == 256) range[0] = join(range[0], range[0], 4);
    if (part < 4) to[2 * (part & 1) + part / 2] = range[0];
  }
}

// Scales of 32 rows. row_at(i): row i as it is coded, its scales to scales[i]; of a refused row,
// which is reported, the first is NaN. Returns the largest magnitude of row `lane`, a bf16 pattern.
// `planes`: scratch.
template <int kHeadDim, typename RowAt>
__device__ __forceinline__ uint32_t scale_rows(const AppendParams& p, const RowAt& row_at,
                                               const RowRecipe& recipe, ScaleZero (*scales)[4],
                                               MagnitudePlanes<kHeadDim>& planes) {
  using Reader = RowReader<kHeadDim>;
  const int lane = threadIdx.x % 32, part = lane % Reader::kLanes, own = lane / Reader::kLanes;
  const int rank = clip_threshold_index(recipe.clip_ratio, kHeadDim);
  Reader next;
  next.load(row_at(own), part);
#pragma unroll 1
  for (int pass = 0; pass < Reader::kLanes; ++pass) {
    Reader x = next;
    const int row = pass * Reader::kRows + own;
    if (pass + 1 < Reader::kLanes) next.load(row_at(row + Reader::kRows), part);
    x.around(row_at(row), part);
    uint32_t range[4];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) range[quarter] = x.range(quarter);
    store_ranges<kHeadDim>(range, part, reinterpret_cast<uint32_t*>(scales[row]));
    if (rank < 0) continue;
    transpose_bits(x.words);
#pragma unroll
    for (int bit = 0; bit < planes.kBits; ++bit) planes.words[bit][row][part] = x.words[bit];
  }
  __syncwarp();
  const uint4 ranges = *reinterpret_cast<const uint4*>(scales[lane]);
  const uint32_t low_half = Reader::wider(ranges.x, ranges.y);
  const uint32_t high_half = Reader::wider(ranges.z, ranges.w);
  const uint32_t whole = Reader::wider(low_half, high_half);
  const uint32_t top = max(whole & 0x7fffu, whole >> 16 & 0x7fffu);
  const uint32_t limit = rank < 0 ? top : planes.pattern_of_rank(lane, rank);
  const float threshold = __uint_as_float(limit << 16);
  int refused = top > 0x7f7fu ? static_cast<int>(RowStatus::kNonFinite) : 0;
  const int groups = kHeadDim / p.format.rows.quant_group_size;
  const uint32_t quarters[4] = {ranges.x, ranges.y, ranges.z, ranges.w};
  __syncwarp();
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    if (g >= groups) break;
    const uint32_t range = groups == 1   ? whole
                           : groups == 2 ? (g == 0 ? low_half : high_half)
                                         : quarters[g];
    // Clamping commutes with min and max.
    const float low = fminf(fmaxf(-__uint_as_float(range << 16), -threshold), threshold);
    const float high = fminf(fmaxf(__uint_as_float(range & 0xffff0000u), -threshold), threshold);
    const ScaleZero sz = scale_and_zero(p.format.rows, low, high);
    if (!refused && (!is_finite(sz.scale) || !is_finite(sz.zero))) {
      refused = static_cast<int>(RowStatus::kMetadataOverflow);
    }
    scales[lane][g] = sz;
  }
  if (refused) {
    report_refused(p, refused);
    scales[lane][0] = refused_scale_zero();
  }
  return top;
}

}  // namespace oscar
