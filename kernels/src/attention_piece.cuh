// Begin and end of a piece, a warp's part of an item: loading Q, settling the accumulator.
#pragma once

#include "attention_state.cuh"

namespace oscar {

// Which query and head each column of an item is.
struct ColumnMap {
  int b, head, first_column, columns, heads_per_kv;  // columns: of the whole KV head
  int q_len, num_qo_heads;
  __device__ int query(int column) const { return column / heads_per_kv; }
  // Row of q, o and lse, or -1 for a column that does not exist.
  __device__ int64_t row(int column_in_item) const {
    const int column = first_column + column_in_item;
    if (column >= columns) return -1;
    return (static_cast<int64_t>(b) * q_len + column / heads_per_kv) * num_qo_heads +
           head * heads_per_kv + column % heads_per_kv;
  }
};

template <typename Config>
__device__ inline ColumnMap column_map(const AttentionParams& p, int b, int head, int column_tile) {
  const int heads_per_kv = p.num_qo_heads / p.num_kv_heads;
  return {
      b,       head,          column_tile * Config::kColumns, p.q_len * heads_per_kv, heads_per_kv,
      p.q_len, p.num_qo_heads};
}

// Q rows of an item to scratch, kExactPitch bytes apart; absent columns become zero.
template <typename Config>
__device__ inline void stage_queries(const AttentionParams& p, const ColumnMap& map,
                                     uint8_t* scratch, int lane) {
  constexpr int kVectors = Config::kHeadDim / 8;  // 16 bytes each
  const int64_t my_row = lane < Config::kColumns ? map.row(lane) : -1;
  __syncwarp();
#pragma unroll
  for (int i = lane; i < Config::kColumns * kVectors; i += 32) {
    const int64_t row = __shfl_sync(~0u, my_row, i / kVectors);
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row >= 0) {
      value = reinterpret_cast<const uint4*>(p.q + row * Config::kHeadDim)[i % kVectors];
    }
    *reinterpret_cast<uint4*>(scratch + i / kVectors * Config::kExactPitch + i % kVectors * 16) =
        value;
  }
  __syncwarp();
}

// fp16 operands for INT2 keys from the staged rows. Each column is scaled by a power of two that
// brings its largest |q| to [2^14, 2^15), so that 4^-4 and small entries stay inside fp16.
template <typename Config>
__device__ inline void load_query_operands(AttentionState<Config>& s, const uint8_t* scratch,
                                           float sm_scale, int lane) {
  using Layout = typename Config::Layout;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < Config::kNT; ++n) {
    const uint16_t* row =
        reinterpret_cast<const uint16_t*>(scratch + (8 * n + g) * Config::kExactPitch);
    uint32_t top = 0;  // bf16 magnitudes order like integers
#pragma unroll
    for (int i = t; i < Config::kHeadDim / 2; i += 4) {
      const uint32_t pair = reinterpret_cast<const uint32_t*>(row)[i];
      top = max(top, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
    }
    top = max(top, __shfl_xor_sync(~0u, top, 1));
    top = max(top, __shfl_xor_sync(~0u, top, 2));
    const int exponent = top == 0 ? 0 : 14 - (static_cast<int>(top >> 7) - 127);
    const int shift = max(-100, min(100, exponent));
    const float normalise = exp2f(static_cast<float>(shift));
    float group_sum[Config::kGroups] = {};
#pragma unroll
    for (int word = 0; word < Layout::kWords; ++word) {
      // Sixteen consecutive dimensions of the consecutive order are two vectors of the row.
      uint32_t low[4], high[4];
      if constexpr (Config::kOrder == PackOrder::kConsecutive) {
        const uint4* from = reinterpret_cast<const uint4*>(row + Layout::key_dim(t, word, 0, 0));
        memcpy(low, from, 16);
        memcpy(high, from + 1, 16);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float a, b;
        if constexpr (Config::kOrder == PackOrder::kConsecutive) {
          a = __uint_as_float(j % 2 ? low[j / 2] & 0xffff0000u : low[j / 2] << 16);
          b = __uint_as_float(j % 2 ? high[j / 2] & 0xffff0000u : high[j / 2] << 16);
        } else {
          a = bf16_to_float(row[Layout::key_dim(t, word, j, 0)]);
          b = bf16_to_float(row[Layout::key_dim(t, word, j, 1)]);
        }
        const float forth = static_cast<float>(1 << (2 * position_exponent(j)));
        const float scale = normalise * (1.0f / forth);
        const __half2 rounded = __floats2half2_rn(a * scale, b * scale);
        memcpy(&s.q[n][(8 * word + j) / 2][j % 2], &rounded, 4);
        const float2 as_used = __half22float2(rounded);
        group_sum[word / Layout::kWordsPerGroup] += (as_used.x + as_used.y) * forth;
      }
    }
    const float factor = sm_scale * kLog2E * exp2f(static_cast<float>(24 - shift));
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      s.logit_factor[n][c] = __shfl_sync(~0u, factor, 8 * t + 4 * c);
#pragma unroll
      for (int k = 0; k < Config::kGroups; ++k) {
        float sum = group_sum[k];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        s.q_sum[n][k][c] = __shfl_sync(~0u, sum, 8 * t + 4 * c) * 5.9604644775390625e-8f;  // 2^-24
      }
    }
  }
}

// INT2 accumulators to plain ones: takes back 4^j 2^-24 of each row and the zeros, and moves
// dimensions from the codes' order to row g and g + 8 of tile m = dimensions 16 m + g, + 8.
template <typename Config>
__device__ inline void settle_accumulator(AttentionState<Config>& s, uint8_t* scratch, int lane) {
  using Layout = typename Config::Layout;
  const int g = lane / 4, t = lane % 4;
  float* turn = reinterpret_cast<float*>(scratch);  // [4 columns][kTurnPitch]
#pragma unroll
  for (int n = 0; n < Config::kNT; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int k = 0; k < Config::kGroups; ++k) {
        s.zero_sum[n][k][c] = sum_over_rows(s.zero_sum[n][k][c]);
      }
    }
    for (int half = 0; half < 2; ++half) {
      __syncwarp();
      if (t / 2 == half) {
#pragma unroll
        for (int i = 0; i < 2 * Config::kTiles; ++i) {
          const int group = i / 8 / Layout::kUnitsPerGroup;
          const float scale = 16777216.0f / (1 << (2 * position_exponent(i % 8)));
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            turn[(2 * (t % 2) + c) * Config::kTurnPitch + Layout::value_dim(g, i)] =
                s.out[n][i / 2][2 * (i % 2) + c] * scale - s.zero_sum[n][group][c];
          }
        }
      }
      __syncwarp();
      if (t / 2 == half) {
#pragma unroll
        for (int m = 0; m < Config::kTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            s.out[n][m][i] =
                turn[(2 * (t % 2) + i % 2) * Config::kTurnPitch + 16 * m + g + 8 * (i / 2)];
          }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < Config::kGroups; ++k) s.zero_sum[n][k][0] = s.zero_sum[n][k][1] = 0.0f;
  }
  __syncwarp();
}

// Half a fragment of the finished output: one dimension of columns c and c + 1 of the item.
template <typename Config>
__device__ inline void write_output(const AttentionParams& p, const ColumnMap& map, int column,
                                    int dim, float2 values, float2 inverse_sums) {
  const int64_t row0 = map.row(column), row1 = map.row(column + 1);
  if (row0 >= 0) p.o[row0 * Config::kHeadDim + dim] = float_to_bf16(values.x * inverse_sums.x);
  if (row1 >= 0) p.o[row1 * Config::kHeadDim + dim] = float_to_bf16(values.y * inverse_sums.y);
}

__device__ inline float inverse_or_zero(float sum) { return sum > 0.0f ? 1.0f / sum : 0.0f; }

__device__ inline float lse_of(float reference, float sum) {
  return sum > 0.0f ? (reference + log2f(sum)) * kLn2 : -INFINITY;
}

}  // namespace oscar
