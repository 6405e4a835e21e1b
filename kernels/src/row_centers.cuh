// Rows around centers (codec.h): which of two is nearer, and what is coded of a row.
#pragma once

#include "ptx.cuh"
#include "row_codec.cuh"

namespace oscar {

__device__ __forceinline__ uint4 eight_around(uint4 x, uint4 o) {
  return make_uint4(pair_around(x.x, o.x), pair_around(x.y, o.y), pair_around(x.z, o.z),
                    pair_around(x.w, o.w));
}

// A row in memory as it is coded.
struct CodedRow {
  const uint16_t* x;
  const uint16_t* table;  // of centers
  int at;                 // of the row's center in it; negative: none

  __device__ __forceinline__ bool centered() const { return at >= 0; }
  // Values 8 i .. 8 i + 7 of the row itself, and what is coded of them.
  __device__ __forceinline__ uint4 plain_eight(int i) const {
    return __ldg(reinterpret_cast<const uint4*>(x) + i);
  }
  __device__ __forceinline__ uint4 around(uint4 values, int i) const {
    if (!centered()) return values;
    return eight_around(values, __ldg(reinterpret_cast<const uint4*>(table + at) + i));
  }
  __device__ __forceinline__ uint4 eight(int i) const { return around(plain_eight(i), i); }
  __device__ __forceinline__ uint2 four(int i) const {
    const uint2 values = __ldg(reinterpret_cast<const uint2*>(x) + i);
    if (!centered()) return values;
    const uint2 o = __ldg(reinterpret_cast<const uint2*>(table + at) + i);
    return make_uint2(pair_around(values.x, o.x), pair_around(values.y, o.y));
  }
  __device__ __forceinline__ float value(int i) const {
    return bf16_to_float(centered() ? around_center(x[i], table[at + i]) : x[i]);
  }
};

// Whether a center at this place of the table is the second one of its two.
__device__ __forceinline__ bool is_second(int place, int head_dim) {
  return place >= 0 && place / head_dim % kCenters == 1;
}

// Scores of eight rows a warp against the centers of two pages, on the tensor cores: products of
// bf16 values are exact in fp32. Lane 4 g + t holds its quarter of column g: columns 0 and 1 are
// the centers of the first page, 2 and 3 those of the next, the others zero.
template <int kHeadDim>
struct CenterScores {
  QuarterRow<kHeadDim> column;
  float half_square[2];  // of columns 2 t and 2 t + 1

  __device__ __forceinline__ CenterScores(const uint16_t* page, const uint16_t* next_page) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < column.kPairs; ++i) column.pair[i] = 0;
    if (g < 4) column.load((g < 2 ? page : next_page) + g % 2 * kHeadDim, t);
    float squares[4] = {};
    add_products(squares, column);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      half_square[c] = 0.5f * __shfl_sync(~0u, squares[c], 4 * (2 * t + c) + t);
    }
  }

  // Bit 4 g + t, t < 2: whether row g is nearer to the second center of the first or next page.
  __device__ __forceinline__ uint32_t second(const QuarterRow<kHeadDim>& row) const {
    float dots[4] = {};
    add_products(dots, row);
    return __ballot_sync(~0u, dots[1] - half_square[1] > dots[0] - half_square[0]);
  }

 private:
  __device__ __forceinline__ void add_products(float (&sums)[4],
                                               const QuarterRow<kHeadDim>& row) const {
#pragma unroll
    for (int i = 0; i < row.kPairs; i += 2) {
      ptx::mma_bf16(sums, row.pair[i], 0, row.pair[i + 1], 0, column.pair[i], column.pair[i + 1]);
    }
  }
};

}  // namespace oscar
