// Begin and end of a piece, a warp's part of an item: loading Q, settling, writing a whole item.
#pragma once

#include "attention_state.cuh"

namespace oscar {

// How the queries of one KV head are cut into items; worked out once by the host.
struct ColumnShape {
  int columns;       // q_len * heads_per_kv, the (query, head) columns of a KV head
  int column_tiles;  // items per KV head and request
  int heads_per_kv;
  uint32_t reciprocal;  // ceil(2^16 / heads_per_kv): exact for columns below 2^8
  __host__ __device__ int query(int column) const {
    return static_cast<int>(static_cast<uint32_t>(column) * reciprocal >> 16);
  }
};

// An item: one request, one KV head, one tile of columns.
struct ItemName {
  int b = 0;
  uint16_t head = 0, column_tile = 0;
};

// Row of q, o and lse of the item's column `column` (0..kColumns - 1), or -1 where there is none.
template <typename Config>
__device__ __forceinline__ int64_t column_row(const AttentionParams& p, const ColumnShape& shape,
                                              const ItemName& item, int column) {
  const int at = item.column_tile * Config::kColumns + column;
  if (at >= shape.columns) return -1;
  const int query = shape.query(at);
  return (static_cast<int64_t>(item.b) * p.q_len + query) * p.num_qo_heads +
         item.head * shape.heads_per_kv + at - query * shape.heads_per_kv;
}

// Row `row` of q, or null. Lane 4 g + t holds parts of column g, with paired tiles g % 4.
template <typename Config>
__device__ __forceinline__ const uint8_t* query_row(const AttentionParams& p,
                                                    const ColumnShape& shape, const ItemName& item,
                                                    int lane) {
  const int64_t row = column_row<Config>(p, shape, item, lane / 4 % Config::kColumns);
  return row < 0 ? nullptr : reinterpret_cast<const uint8_t*>(p.q + row * Config::kHeadDim);
}

// The parts of a bf16 row that fp16 operands of this lane against key codes are made of; zeros for
// no row.
template <typename Config>
__device__ __forceinline__ void fetch_code_dims(uint32_t* raw, const uint8_t* row, int lane) {
  using Layout = typename Config::Layout;
  constexpr int kRunWords = Layout::kKeyRun / 2;
#pragma unroll
  for (int i = 0; i < Layout::kKeyRuns * kRunWords; ++i) raw[i] = 0;
  if (row) {
#pragma unroll
    for (int run = 0; run < Layout::kKeyRuns; ++run) {
      load_words<2 * Layout::kKeyRun>(raw + run * kRunWords,
                                      row + 2 * Layout::key_run_dim(lane % 4, run));
    }
  }
}

template <typename Config>
__device__ __forceinline__ void fetch_code_queries(AttentionState<Config>& s, const uint8_t* row,
                                                   int lane) {
  fetch_code_dims<Config>(&s.q[0][0], row, lane);
}

// What was fetched becomes fp16 operands for INT2 keys. A power of two common to all columns
// brings the largest |q| to [2^14, 2^15), so that 4^-4 and small entries stay inside fp16.
template <typename Config>
__device__ __forceinline__ void convert_code_queries(AttentionState<Config>& s, float sm_scale,
                                                     int lane) {
  using Layout = typename Config::Layout;
  constexpr int kRunWords = Layout::kKeyRun / 2;
  const int g = lane / 4, t = lane % 4;
  uint32_t raw[Layout::kKeyRuns * kRunWords];
#pragma unroll
  for (int i = 0; i < Layout::kKeyRuns * kRunWords; ++i) raw[i] = (&s.q[0][0])[i];
  uint32_t pair = 0;  // bf16 magnitudes order like integers
#pragma unroll
  for (int i = 0; i < Layout::kKeyRuns * kRunWords; ++i) {
    pair = __vmaxu2(pair, raw[i] & 0x7fff7fffu);
  }
  const uint32_t top = __reduce_max_sync(~0u, max(pair & 0xffffu, pair >> 16));
  const int exponent = top == 0 ? 0 : 14 - (static_cast<int>(top >> 7) - 127);
  const int shift = max(-100, min(100, exponent));
  const auto power_of_two = [](int e) { return __uint_as_float((127 + e) << 23); };
  const float normalise = power_of_two(shift);
  const auto value = [&](int index) {
    return __uint_as_float(index % 2 ? raw[index / 2] & 0xffff0000u : raw[index / 2] << 16);
  };
#pragma unroll
  for (int word = 0; word < Layout::kWords; ++word) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float scale = normalise / static_cast<float>(1 << (2 * position_exponent(j)));
      const __half2 rounded = __floats2half2_rn(value(Layout::key_index(word, j, 0)) * scale,
                                                value(Layout::key_index(word, j, 1)) * scale);
      memcpy(&s.q[(8 * word + j) / 2][j % 2], &rounded, 4);
    }
  }
  s.logit_factor = sm_scale * kLog2E * power_of_two(24 - shift);
  // Sums of the rounded entries: the product with codes that are all one.
#pragma unroll
  for (int k = 0; k < Config::kGroups; ++k) {
    constexpr int kSteps = Config::kTiles / Config::kGroups;
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint32_t a = 0x00010001u << (2 * position_exponent(2 * i % 8));
      const uint32_t b = 0x00010001u << (2 * position_exponent((2 * i + 1) % 8));
      ptx::mma_f16(sums, a, a, b, b, s.q[k * kSteps + i][0], s.q[k * kSteps + i][1]);
    }
    if constexpr (Config::kZerosOnTensor) {
      const float even = __shfl_sync(~0u, sums[0], g / 2), odd = __shfl_sync(~0u, sums[1], g / 2);
      const float x = g % 2 ? -odd : -even;
      const float high = __half2float(__float2half_rn(x));
      const __half2 parts = __floats2half2_rn(high, (x - high) * 1024.0f);
      uint32_t bits;
      memcpy(&bits, &parts, 4);
      // Zeros of even tiles lie in lanes t = 0, of odd ones, with paired tiles, in lanes t = 2.
      s.zero_queries[k] = t == (Config::kPairedTiles ? g / 4 * 2 : 0) ? bits : 0;
    } else {
      s.q_sum[k][0] = sums[0], s.q_sum[k][1] = sums[1];
    }
  }
}

// bf16 operands for exact keys: lane t holds vectors t, 4 + t, ... of eight dimensions.
template <typename Config>
__device__ __forceinline__ void load_exact_queries(AttentionState<Config>& s, const uint8_t* row,
                                                   int lane) {
#pragma unroll
  for (int i = 0; i < Config::kTiles / 2; ++i) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row) v = reinterpret_cast<const uint4*>(row)[4 * i + lane % 4];
    s.q[2 * i][0] = v.x, s.q[2 * i][1] = v.y, s.q[2 * i + 1][0] = v.z, s.q[2 * i + 1][1] = v.w;
  }
}

// INT2 accumulators to plain ones: takes back 4^j 2^-24 of each dimension and the zeros.
template <typename Config>
__device__ __forceinline__ void settle_accumulator(AttentionState<Config>& s, int lane) {
  float zeros[Config::kGroups][2];
#pragma unroll
  for (int k = 0; k < Config::kGroups; ++k) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if constexpr (!Config::kZerosOnTensor) {
        zeros[k][c] = sum_over_rows<Config>(s.zero_sum[k][c]);
      } else if constexpr (Config::kPairedTiles) {  // rows g < 4 are of the even tiles, the others
                                                    // odd
        zeros[k][c] = __shfl_sync(~0u, s.zero_sum[k][c], lane % 2) +
                      __shfl_sync(~0u, s.zero_sum[k][c], 16 + 2 + lane % 2);
      } else {
        zeros[k][c] = s.zero_sum[k][c];
      }
      s.zero_sum[k][c] = s.zero_sum[k][c + 2] = 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * Config::kTiles; ++i) {
    const float scale = 16777216.0f / static_cast<float>(1 << (2 * position_exponent(i % 8)));
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& x = s.out[i / 2][2 * (i % 2) + c];
      x = x * scale - zeros[i / 8 / Config::Layout::kUnitsPerGroup][c];
    }
  }
}

__device__ __forceinline__ float inverse_or_zero(float sum) {
  return sum == 0.0f ? 0.0f : 1.0f / sum;  // NaN stays NaN
}

__device__ __forceinline__ void write_lse(const AttentionParams& p, int64_t row, float reference,
                                          float sum) {
  if (p.lse) p.lse[row] = sum == 0.0f ? -INFINITY : (reference + log2f(sum)) * kLn2;
}

// Output and lse of an item that one warp did alone; s is settled, its sums are over the rows.
template <typename Config>
__device__ __forceinline__ void write_item(const AttentionParams& p, const ColumnShape& shape,
                                           AttentionState<Config>& s, const ItemName& item,
                                           int lane) {
  using Layout = typename Config::Layout;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int column = 2 * t + c;
    const int64_t row = column < Config::kColumns ? column_row<Config>(p, shape, item, column) : -1;
    if (row < 0) continue;
    const float factor = inverse_or_zero(s.sum[c]);
    uint16_t values[2 * Config::kTiles];  // in the order of the lane's dimensions
#pragma unroll
    for (int i = 0; i < 2 * Config::kTiles; ++i) {
      values[i] = float_to_bf16(s.out[i / 2][2 * (i % 2) + c] * factor);
    }
#pragma unroll
    for (int i = 0; i < 2 * Config::kTiles; i += 2) {
      const int dim = Layout::value_run_dim(g, i / Layout::kValueRun) + i % Layout::kValueRun;
      *reinterpret_cast<uint32_t*>(p.o + row * Config::kHeadDim + dim) =
          values[i] | static_cast<uint32_t>(values[i + 1]) << 16;
    }
    if (g == 0) write_lse(p, row, s.reference[c], s.sum[c]);
  }
}

}  // namespace oscar
