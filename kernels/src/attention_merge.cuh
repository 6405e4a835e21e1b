// Joins the pieces of an item in a fixed order: those of a block's warps and the parts that blocks
// before it have sent.
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
__device__ __forceinline__ void send(float2* to, float2 value) {
  const auto word = [](float x) {
    const uint32_t bits = __float_as_uint(x);
    return ~(bits == 0xffffffffu ? 0x7fffffffu : bits);
  };
  ptx::store_relaxed(to, make_uint2(word(value.x), word(value.y)));
}
__device__ __forceinline__ bool was_sent(uint2 words) { return words.x != 0 && words.y != 0; }
__device__ __forceinline__ float2 received(uint2 words) {
  return make_float2(__uint_as_float(~words.x), __uint_as_float(~words.y));
}
// Ready for the next launch.
__device__ __forceinline__ void clear_sent(float2* at) {
  *reinterpret_cast<uint2*>(at) = make_uint2(0, 0);
}

// Finite numbers order like integers once those below zero are turned over.
__device__ __forceinline__ float largest_of_warp(float x) {
  const auto turn = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
  return __int_as_float(turn(__reduce_max_sync(~0u, turn(__float_as_int(x)))));
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
      const float top = fmaxf(reference, largest_of_warp(own.x));
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
  const int column = Partial<Config>::column(pair), dim = Partial<Config>::dim(pair);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int64_t row = column_row<Config>(p, shape, item, column + c);
    if (row < 0) continue;
    p.o[row * Config::kHeadDim + dim] =
        float_to_bf16((c ? value.y : value.x) * inverse_or_zero(totals[column + c].y));
  }
}

// Joins the pieces local(i), i < locals, of an item that this block's warps left and the parts
// sent(i), i < blocks, of blocks before it. ready() follows when totals is known, done(pair, total)
// for every pair of columns.
template <typename Config, typename Local, typename Sent, typename Ready, typename Done>
__device__ __forceinline__ void join_pieces(int locals, int blocks, Local local, Sent sent,
                                            float* factors, float2* totals, Ready ready,
                                            Done done) {
  join_factors<Config>(
      locals + blocks,
      [&](int part, int column) {
        if (part < locals) return local(part).columns()[column];
        float2* from = sent(part - locals).columns() + column;
        uint2 words;
        do {
          words = ptx::load_relaxed(from);
        } while (!was_sent(words));
        clear_sent(from);
        return received(words);
      },
      factors, totals);
  ready();
  // Parts of other blocks whose words are on their way, as many as registers allow.
  constexpr int kAtOnce =
      Config::kTwins && Config::kHeadDim == 128 && Config::kGroups == 1 ? 16 : 8;
#pragma unroll 1
  for (int pair = threadIdx.x; pair < Config::kPairs; pair += blockDim.x) {
    uint2 words[kAtOnce];
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        words[i] = ptx::load_relaxed(sent(min(first + i, blocks - 1)).pairs() + pair);
      }
    };
    if (blocks > 0) load(0);
    float2 total = make_float2(0.0f, 0.0f);
    const float2* factor = reinterpret_cast<const float2*>(factors + Partial<Config>::column(pair));
#pragma unroll 6
    for (int i = 0; i < locals; ++i) {
      add_scaled(total, local(i).pairs()[pair], factor[i * (Config::kColumns / 2)]);
    }
    factor += locals * (Config::kColumns / 2);
#pragma unroll 1
    for (int first = 0; first < blocks; first += kAtOnce) {
      if (first > 0) load(first);
      while (true) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) all = all && was_sent(words[i]);
        if (all) break;
        load(first);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < blocks) {
          add_scaled(total, received(words[i]), factor[(first + i) * (Config::kColumns / 2)]);
          clear_sent(sent(first + i).pairs() + pair);
        }
      }
    }
    done(pair, total);
  }
}

}  // namespace oscar
