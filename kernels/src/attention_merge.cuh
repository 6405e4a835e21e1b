// Joins the pieces of an item in a fixed order: first within a block, then across blocks.
#pragma once

#include "attention_piece.cuh"

namespace oscar {

// A partial result: kPartialFragments float4, then (reference, sum) of each column.
// Fragment (n, m, lane): (dim, dim, dim + 8, dim + 8) x (column, column + 1) with
// dim = 16 m + lane / 4 and column = 8 n + 2 (lane % 4).
template <typename Config>
struct Partial {
  float4* fragments;
  __device__ float2* columns() const {
    return reinterpret_cast<float2*>(fragments + Config::kPartialFragments);
  }
  // Half h of fragment f is number 2 f + h.
  __device__ float2* halves() const { return reinterpret_cast<float2*>(fragments); }
};
template <typename Config>
__device__ inline int half_column(int half) {
  return half / (64 * Config::kTiles) * 8 + 2 * (half / 2 % 4);
}
template <typename Config>
__device__ inline int half_dim(int half) {
  return 16 * (half / 64 % Config::kTiles) + half / 2 % 32 / 4 + 8 * (half % 2);
}

// Where a warp left its pieces that are not whole items.
struct PieceNote {
  int b = -1;  // < 0: none
  uint16_t head = 0, column_tile = 0;
  __device__ bool same_item(const PieceNote& other) const {
    return b == other.b && head == other.head && column_tile == other.column_tile;
  }
};

template <typename Config>
__device__ inline void store_partial(const AttentionState<Config>& s, Partial<Config> to,
                                     int lane) {
#pragma unroll
  for (int n = 0; n < Config::kNT; ++n) {
#pragma unroll
    for (int m = 0; m < Config::kTiles; ++m) {
      to.fragments[(n * Config::kTiles + m) * 32 + lane] =
          make_float4(s.out[n][m][0], s.out[n][m][1], s.out[n][m][2], s.out[n][m][3]);
    }
    if (lane < 4) {  // sums were already reduced over the rows
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        to.columns()[8 * n + 2 * lane + c] = make_float2(s.reference[n][c], s.sum[n][c]);
      }
    }
  }
}

// What another block wrote is read past this multiprocessor's L1 cache.
template <bool kOtherBlocks>
__device__ inline float2 load_part(const float2* from) {
  return kOtherBlocks ? __ldcg(from) : *from;
}

// Factors that bring `count` partials to one reference: factors[part * kColumns + column], and in
// totals[column] the reference and sum of the join. One warp a column; the block synchronises.
template <typename Config, bool kOtherBlocks, typename At>
__device__ inline void join_factors(int count, At at, float* factors, float2* totals) {
  const int lane = threadIdx.x % 32;
  for (int column = threadIdx.x / 32; column < Config::kColumns; column += blockDim.x / 32) {
    float reference = kNoReference;
    for (int part = lane; part < count; part += 32) {
      reference = fmaxf(reference, load_part<kOtherBlocks>(&at(part).columns()[column]).x);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      reference = fmaxf(reference, __shfl_xor_sync(~0u, reference, step));
    }
    float sum = 0.0f;
    for (int part = lane; part < count; part += 32) {
      const float2 own = load_part<kOtherBlocks>(&at(part).columns()[column]);
      const float factor = exp2f(own.x - reference);
      factors[part * Config::kColumns + column] = factor;
      sum += own.y * factor;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) totals[column] = make_float2(reference, sum);
  }
  __syncthreads();
}

// Sum of one half fragment over the partials, in order.
template <typename Config, bool kOtherBlocks, typename At>
__device__ inline float2 join_half(int half, int count, At at, const float* factors) {
  const int column = half_column<Config>(half);
  float2 total = make_float2(0.0f, 0.0f);
#pragma unroll 8
  for (int part = 0; part < count; ++part) {
    const float2 value = load_part<kOtherBlocks>(at(part).halves() + half);
    const float2 factor =
        *reinterpret_cast<const float2*>(factors + part * Config::kColumns + column);
    total.x += value.x * factor.x;
    total.y += value.y * factor.y;
  }
  return total;
}

template <typename Config>
__device__ inline void write_lse(const AttentionParams& p, const ColumnMap& map, int column,
                                 float2 total) {
  const int64_t row = map.row(column);
  if (p.lse && row >= 0) p.lse[row] = lse_of(total.x, total.y);
}

}  // namespace oscar
