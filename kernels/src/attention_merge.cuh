// Joins the pieces of an item in a fixed order: first within a block, then across blocks.
#pragma once

#include "attention_piece.cuh"

namespace oscar {

// A warp's piece: fragment (m, lane) at m * 32 + lane, then (reference, sum) of the eight
// tensor-core columns.
template <typename Config>
struct Partial {
  uint8_t* bytes;
  __device__ float4* fragments() const { return reinterpret_cast<float4*>(bytes); }
  __device__ float2* columns() const {
    return reinterpret_cast<float2*>(bytes + Config::kTiles * 32 * 16);
  }
};

// A block's part of an item. Pair ((m * 8 + g) * kColumns / 2 + t) * 2 + h holds dimension
// value_dim(g, 2 m + h) of columns 2t and 2t + 1; then (reference, sum) of each column.
template <typename Config>
struct Joined {
  uint8_t* bytes;
  static constexpr int kColumnPairs = Config::kColumns / 2;
  __device__ float2* pairs() const { return reinterpret_cast<float2*>(bytes); }
  __device__ float2* columns() const {
    return reinterpret_cast<float2*>(bytes + Config::kJoinedPairs * 8);
  }
  __device__ static int column(int pair) { return pair / 2 % kColumnPairs * 2; }
  __device__ static int dim(int pair) {
    const int g = pair / (2 * kColumnPairs) % 8, m = pair / (16 * kColumnPairs);
    return Config::Layout::value_dim(g, 2 * m + pair % 2);
  }
  // Where a warp's partial holds the pair, as a float2 index; `copy`: which of the twins.
  __device__ static int in_partial(int pair, int copy) {
    const int t = pair / 2 % kColumnPairs + copy * kColumnPairs;
    return (pair / (2 * kColumnPairs) * 4 + t) * 2 + pair % 2;
  }
};

// Where a warp left its piece of an item that is not wholly its own.
struct alignas(16) PieceNote {
  int base = -1, last = 0;  // weight before the item, and before its last entry; < 0: no piece
  ItemName item;
};

template <typename Config>
__device__ __forceinline__ void store_partial(const AttentionState<Config>& s, Partial<Config> to,
                                              int lane) {
#pragma unroll
  for (int m = 0; m < Config::kTiles; ++m) {
    to.fragments()[m * 32 + lane] = make_float4(s.out[m][0], s.out[m][1], s.out[m][2], s.out[m][3]);
  }
  if (lane < 4) {  // sums were already reduced over the rows
    to.columns()[2 * lane] = make_float2(s.reference[0], s.sum[0]);
    to.columns()[2 * lane + 1] = make_float2(s.reference[1], s.sum[1]);
  }
}

// Factors that bring `count` parts to one reference: factors[part * kColumns + column], and in
// totals[column] the reference and sum of the join. part_column(part, column) reads a part's
// reference and sum. One warp a column; the block synchronises.
template <typename Config, typename PartColumn>
__device__ __forceinline__ void join_factors(int count, PartColumn part_column, float* factors,
                                             float2* totals) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int column = threadIdx.x / 32; column < Config::kColumns; column += blockDim.x / 32) {
    float reference = kNoReference, sum = 0.0f;
#pragma unroll 1
    for (int base = 0; base < count; base += 32) {
      const float2 own =
          base + lane < count ? part_column(base + lane, column) : make_float2(kNoReference, 0.0f);
      float top = fmaxf(reference, own.x);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      sum = sum * ptx::exp2_approx(reference - top) + own.y * ptx::exp2_approx(own.x - top);
      reference = top;
      if (base + lane < count) factors[(base + lane) * Config::kColumns + column] = own.x;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll 1
    for (int part = lane; part < count; part += 32) {
      float& factor = factors[part * Config::kColumns + column];
      factor = ptx::exp2_approx(factor - reference);
    }
    if (lane == 0) totals[column] = make_float2(reference, sum);
  }
  __syncthreads();
}

__device__ __forceinline__ void add_scaled(float2& total, float2 value, float2 factor) {
  total.x = fmaf(value.x, factor.x, total.x);
  total.y = fmaf(value.y, factor.y, total.y);
}

// One dimension of columns `column` and column + 1 of the finished output.
template <typename Config>
__device__ __forceinline__ void write_output(const AttentionParams& p, const ColumnShape& shape,
                                             const ItemName& item, int pair, float2 value,
                                             const float2* totals) {
  const int column = Joined<Config>::column(pair), dim = Joined<Config>::dim(pair);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int64_t row = column_row<Config>(p, shape, item, column + c);
    if (row < 0) continue;
    p.o[row * Config::kHeadDim + dim] =
        float_to_bf16((c ? value.y : value.x) * inverse_or_zero(totals[column + c].y));
  }
}

}  // namespace oscar
