// Pieces of an item and the parts that blocks send each other: where they lie, and how they are
// added in a fixed order.
#pragma once

#include "attention_piece.cuh"

namespace oscar {

// A piece of an item. Pair ((m * 8 + g) * kColumns / 2 + t) * 2 + h holds dimension
// value_dim(g, 2 m + h) of columns 2t and 2t + 1; then (reference, sum) of each column.
template <typename Config>
struct Partial {
  uint8_t* bytes;
  static constexpr int kColumnPairs = Config::kColumns / 2;
  __device__ float2* pairs() const { return reinterpret_cast<float2*>(bytes); }
  // Dimensions h = 0 and 1 of a pair of columns; `pair` is even.
  __device__ float4* two_pairs(int pair) const { return reinterpret_cast<float4*>(pairs() + pair); }
  __device__ float2* columns() const { return pairs() + Config::kPairs; }
  __device__ static int column(int pair) { return pair / 2 % kColumnPairs * 2; }
  __device__ static int dim(int pair) {
    const int g = pair / (2 * kColumnPairs) % 8, m = pair / (16 * kColumnPairs);
    return Config::Layout::value_dim(g, 2 * m + pair % 2);
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
  constexpr int kColumnPairs = Partial<Config>::kColumnPairs;
  const int g = lane / 4, t = lane % 4;
  if (t >= kColumnPairs) return;
#pragma unroll
  for (int m = 0; m < Config::kTiles; ++m) {
    reinterpret_cast<float4*>(to.bytes)[(m * 8 + g) * kColumnPairs + t] =
        make_float4(s.out[m][0], s.out[m][1], s.out[m][2], s.out[m][3]);
  }
  if (g == 0) {  // sums were already reduced over the rows
    to.columns()[2 * t] = make_float2(s.reference[0], s.sum[0]);
    to.columns()[2 * t + 1] = make_float2(s.reference[1], s.sum[1]);
  }
}

// What goes from block to block says itself that it is there: a word is zero until it is sent and
// again once it was received, and what is sent is inverted; the one NaN that would be zero then
// becomes another. No fence, no counter.
__device__ __forceinline__ uint32_t sent_word(float x) {
  const uint32_t bits = __float_as_uint(x);
  return ~(bits == 0xffffffffu ? 0x7fffffffu : bits);
}
__device__ __forceinline__ void send(float2* to, float2 value) {
  ptx::store_relaxed(to, make_uint2(sent_word(value.x), sent_word(value.y)));
}
__device__ __forceinline__ void send(float4* to, float4 value) {
  ptx::store_relaxed_4(to, make_uint4(sent_word(value.x), sent_word(value.y), sent_word(value.z),
                                      sent_word(value.w)));
}
__device__ __forceinline__ bool was_sent(uint2 words) { return words.x != 0 && words.y != 0; }
__device__ __forceinline__ bool was_sent(uint4 words) {
  return min(min(words.x, words.y), min(words.z, words.w)) != 0;
}
__device__ __forceinline__ float2 received(uint2 words) {
  return make_float2(__uint_as_float(~words.x), __uint_as_float(~words.y));
}
__device__ __forceinline__ float4 received(uint4 words) {
  return make_float4(__uint_as_float(~words.x), __uint_as_float(~words.y),
                     __uint_as_float(~words.z), __uint_as_float(~words.w));
}
// Ready for the next launch.
__device__ __forceinline__ void clear_sent(float2* at) {
  *reinterpret_cast<uint2*>(at) = make_uint2(0, 0);
}
__device__ __forceinline__ void clear_sent(float4* at) {
  *reinterpret_cast<uint4*>(at) = make_uint4(0, 0, 0, 0);
}

// Finite numbers order like integers once those below zero are turned over.
__device__ __forceinline__ float largest_of_warp(float x) {
  const auto turn = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(turn(__reduce_max_sync(~0u, turn(__float_as_int(x)))));
}

// Sum over the warp, in a fixed order.
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ void add_scaled(float4& total, float4 value, float2 factor) {
  total.x = fmaf(value.x, factor.x, total.x);
  total.y = fmaf(value.y, factor.y, total.y);
  total.z = fmaf(value.z, factor.x, total.z);
  total.w = fmaf(value.w, factor.y, total.w);
}

// Writes lse of a column whose (reference, sum) is known. Returns the bits of its row of the
// output, negative where there is none, and what its sums are multiplied with.
template <typename Config>
__device__ __forceinline__ float2 finish_column(const AttentionParams& p, const ColumnShape& shape,
                                                const ItemName& item, int column, float2 total) {
  const int64_t row = column_row<Config>(p, shape, item, column);
  if (row >= 0) write_lse(p, row, total.x, total.y);
  return make_float2(__int_as_float(static_cast<int>(row)), inverse_or_zero(total.y));
}

// Two dimensions of two columns of the finished output; columns: see finish_column.
template <typename Config>
__device__ __forceinline__ void write_output(const AttentionParams& p, int pair, float4 sum,
                                             const float2* columns) {
  const int column = Partial<Config>::column(pair);
  const int dim = Partial<Config>::dim(pair);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = __float_as_int(columns[column + c].x);
    const float factor = columns[column + c].y;
    if (row < 0) continue;
    uint16_t* const o = p.o + static_cast<int64_t>(row) * Config::kHeadDim;
    const __nv_bfloat162 values =
        __floats2bfloat162_rn((c ? sum.y : sum.x) * factor, (c ? sum.w : sum.z) * factor);
    *reinterpret_cast<__nv_bfloat162*>(o + dim) = values;  // side by side
  }
}

// The pieces that a block's warps left, by lane: 2 w is the head of warp w, 2 w + 1 its tail.
// Pieces of an item follow each other.
struct BlockPieces {
  uint32_t valid, starts;  // lanes that have a piece; those whose piece is the first of its item
  __device__ int items() const { return __popc(starts); }
  __device__ int rank(int lane) const { return __popc(valid & ((1u << lane) - 1)); }
  // First lane of the item, counted from the last, and lanes of its pieces.
  __device__ int first(int from_last, uint32_t& lanes) const {
    uint32_t below = ~0u;
    int at = 31 - __clz(starts);
#pragma unroll 1
    for (; from_last > 0; --from_last) {
      below = (1u << at) - 1;
      at = 31 - __clz(starts & below);
    }
    lanes = valid & below & (~0u << at);
    return at;
  }
};
__device__ __forceinline__ BlockPieces block_pieces(int base, int lane) {
  BlockPieces pieces;
  pieces.valid = __ballot_sync(~0u, base >= 0);
  const uint32_t below = pieces.valid & ((1u << lane) - 1);
  const int before = __shfl_sync(~0u, base, 31 - __clz(below | 1));
  pieces.starts = __ballot_sync(~0u, base >= 0 && (below == 0 || before != base));
  return pieces;
}

// Reference and sum that a part of another block brings, waited for and cleared.
__device__ __forceinline__ float2 receive(float2* from) {
  uint2 words;
  do {
    words = ptx::load_relaxed(from);
  } while (!was_sent(words));
  clear_sent(from);
  return received(words);
}

}  // namespace oscar
