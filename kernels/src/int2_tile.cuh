// A span of tokens of an INT2 page: logits, weights and their contribution to the output.
#pragma once

#include <utility>

#include "attention_state.cuh"

namespace oscar {

// Row r (0..7) of a half tile is token row_token(r), chosen so that the key rows that a half-warp
// reads together, and the value rows 2t or 2t + 1, lie in different banks. Rows 2t and 2t + 1 hold
// tokens that differ in bit 0.
__host__ __device__ constexpr int row_token(int r) { return r ^ (r >> 2); }

template <MetadataDtype kMetadata>
__device__ __forceinline__ float2 scale_and_zero(const uint8_t* address) {
  if constexpr (kMetadata == MetadataDtype::kFp32) {
    return *reinterpret_cast<const float2*>(address);
  } else {
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(address);
    if constexpr (kMetadata == MetadataDtype::kFp16) {
      __half2 pair;
      memcpy(&pair, &bits, 4);
      return __half22float2(pair);
    } else {
      return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    }
  }
}

template <int kStep, typename Config>
__device__ __forceinline__ void key_step(
    const AttentionState<Config>& s,
    const uint32_t (&words)[Config::kSpanTiles][2][Config::Layout::kWords],
    float (&scores)[Config::kSpanTiles][Config::kGroups][4]) {
  constexpr int i0 = 2 * kStep, w = i0 / 8, j0 = i0 % 8, j1 = j0 + 1;
#pragma unroll
  for (int tile = 0; tile < Config::kSpanTiles;
       ++tile) {  // independent chains of accumulation, in turn
    const uint32_t near = words[tile][0][w], far = words[tile][1][w];
    const uint32_t(&q)[2] =
        Config::kTwins && tile % 2 ? s.q_twin[Config::kTwins ? kStep : 0] : s.q[kStep];
    ptx::mma_f16(scores[tile][w / Config::Layout::kWordsPerGroup], code_pair<j0>(near, near >> 6),
                 code_pair<j0>(far, far >> 6), code_pair<j1>(near, near >> 6),
                 code_pair<j1>(far, far >> 6), q[0], q[1]);
  }
}
template <typename Config, int... kStep>
__device__ __forceinline__ void key_steps(
    const AttentionState<Config>& s,
    const uint32_t (&words)[Config::kSpanTiles][2][Config::Layout::kWords],
    float (&scores)[Config::kSpanTiles][Config::kGroups][4], std::integer_sequence<int, kStep...>) {
  (key_step<kStep, Config>(s, words, scores), ...);
}

template <int kTile, typename Config>
__device__ __forceinline__ void value_step(AttentionState<Config>& s,
                                           const uint32_t (&near)[Config::Layout::kUnits],
                                           const uint32_t (&far)[Config::Layout::kUnits],
                                           const uint32_t (&p)[Config::kGroups][2]) {
  constexpr int i0 = 2 * kTile, u = i0 / 8, j0 = i0 % 8, j1 = j0 + 1;
  constexpr int group = u / Config::Layout::kUnitsPerGroup;
  ptx::mma_f16(s.out[kTile], code_pair<j0>(near[u], near[u] >> 6),
               code_pair<j1>(near[u], near[u] >> 6), code_pair<j0>(far[u], far[u] >> 6),
               code_pair<j1>(far[u], far[u] >> 6), p[group][0], p[group][1]);
}
template <typename Config, int... kTile>
__device__ __forceinline__ void value_steps(AttentionState<Config>& s,
                                            const uint32_t (&near)[Config::Layout::kUnits],
                                            const uint32_t (&far)[Config::Layout::kUnits],
                                            const uint32_t (&p)[Config::kGroups][2],
                                            std::integer_sequence<int, kTile...>) {
  (value_step<kTile, Config>(s, near, far, p), ...);
}

// Half-words of two tokens side by side: unit u of `first` below that of `second`.
template <typename Config>
__device__ __forceinline__ void pair_units(const uint8_t* first, const uint8_t* second,
                                           uint32_t (&units)[Config::Layout::kUnits]) {
  using Layout = typename Config::Layout;
#pragma unroll
  for (int k = 0; k < Config::kGroups; ++k) {
    const int at = k * Layout::kGroupBytes;
    if constexpr (Layout::kUnitsPerGroup == 1) {
      units[k] = __byte_perm(*reinterpret_cast<const uint16_t*>(first + at),
                             *reinterpret_cast<const uint16_t*>(second + at), 0x5410);
    } else {
      constexpr int kWordsHere = Layout::kUnitsPerGroup / 2;
      uint32_t a[kWordsHere], b[kWordsHere];
      load_words<4 * kWordsHere>(a, first + at);
      load_words<4 * kWordsHere>(b, second + at);
#pragma unroll
      for (int w = 0; w < kWordsHere; ++w) {
        units[k * Layout::kUnitsPerGroup + 2 * w] = __byte_perm(a[w], b[w], 0x5410);
        units[k * Layout::kUnitsPerGroup + 2 * w + 1] = __byte_perm(a[w], b[w], 0x7632);
      }
    }
  }
}

// Two halves of the metadata pair, the zero in both.
__device__ __forceinline__ uint32_t zero_twice(uint32_t scale_zero) {
  return __byte_perm(scale_zero, scale_zero, 0x3232);
}

// Sets the metadata of absent tokens to zero, so that whatever lies there cannot reach a sum.
template <typename Config>
__device__ __forceinline__ void clear_absent_metadata(uint8_t* chunk, int valid, int lane) {
  constexpr int kRowWords = Config::kMetadataRow / 4;
  uint32_t* words =
      reinterpret_cast<uint32_t*>(chunk + 2 * kPageTokens * Config::Layout::kRowBytes);
#pragma unroll 1
  for (int i = valid * kRowWords + lane; i < kPageTokens * kRowWords; i += 32) {
    words[i] = words[kPageTokens * kRowWords + i] = 0;
  }
  ptx::fence_shared_before_copies();
  __syncwarp();
}

// Where a lane reads in a chunk, in bytes; and 1 or 0, whether its columns are of even or odd
// tiles.
struct SpanOffsets {
  int keys, metadata, values0, values1;
  uint32_t even, odd;
};

template <typename Config>
__device__ __forceinline__ SpanOffsets span_offsets(int lane) {
  using Layout = typename Config::Layout;
  const int g = lane / 4, t = lane % 4;
  const int own_row = (Config::kTwins ? t / 2 * 16 : 0) + row_token(g);
  SpanOffsets at;
  at.keys = row_token(g) * Layout::kRowBytes + t * 4 * Layout::kWordsPerGroup;
  at.metadata = 2 * kPageTokens * Layout::kRowBytes + own_row * Config::kMetadataRow;
  at.values0 =
      (kPageTokens + row_token(2 * t)) * Layout::kRowBytes + g * 2 * Layout::kUnitsPerGroup;
  at.values1 = at.values0 ^ Layout::kRowBytes;  // rows 2t and 2t + 1 differ in bit 0
  at.even = lane < 16, at.odd = lane >= 16;
  // Opaque, or the compiler derives them anew for every span, and selects instead of multiplying:
  // the integer pipe is the busiest one, products are made by another.
  asm volatile("" : "+r"(at.keys), "+r"(at.metadata), "+r"(at.values0), "+r"(at.values1));
  asm volatile("" : "+r"(at.even), "+r"(at.odd));
  return at;
}

// kSpanTokens tokens; `codes` and `metadata` are the chunk, moved on by the tokens before them in
// the page. Of these, the ones >= valid are absent and their metadata is zero. `fresh`: the columns
// have no reference yet. A weight beyond fp16 shows as a sum beyond kLargestWeight; then the
// references move and the weights are computed again.
template <typename Config>
__device__ __forceinline__ void int2_span(AttentionState<Config>& s, const uint8_t* codes,
                                          const uint8_t* metadata, const SpanOffsets& at, int valid,
                                          bool fresh, int lane) {
  using Layout = typename Config::Layout;
  constexpr int kGroups = Config::kGroups, kRow = Layout::kRowBytes;
  constexpr int kSets =
      Config::kSpanTiles / Config::kCopies;  // tiles whose weights a lane computes
  constexpr int kSetTokens = 16 * Config::kCopies;
  constexpr int kMeta = Config::kMetadataRow;
  const int t = lane % 4;
  const uint8_t* key_metadata = metadata + at.metadata;
  const uint8_t* key_rows = codes + at.keys;

  float scores[Config::kSpanTiles][kGroups][4] = {};
  uint32_t words[Config::kSpanTiles][2][Layout::kWords];
#pragma unroll
  for (int tile = 0; tile < Config::kSpanTiles; ++tile) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        load_words<4 * Layout::kWordsPerGroup>(
            words[tile][row] + k * Layout::kWordsPerGroup,
            key_rows + (16 * tile + 8 * row) * kRow + k * Layout::kGroupBytes);
      }
    }
  }
  float key_scale[kSets][kGroups][2];
  if constexpr (Config::kZerosOnTensor) {
    // The scores begin at -zero sum q: (zero, zero 2^-10) times the two parts of the sum.
    const __half2 parts = __floats2half2_rn(1.0f, 1.0f / 1024.0f);
#pragma unroll
    for (int u = 0; u < kSets; ++u) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        uint32_t zeros[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const __half2 pair = *reinterpret_cast<const __half2*>(
              key_metadata + (kSetTokens * u + 8 * row) * kMeta + 4 * k);
          key_scale[u][k][row] = __low2float(pair) * s.logit_factor;
          const __half2 zero = __hmul2(__high2half2(pair), parts);
          memcpy(&zeros[row], &zero, 4);
        }
        ptx::mma_f16_k8(scores[Config::kCopies * u][k], zeros[0], zeros[1], s.zero_queries[k]);
      }
    }
  }
  key_steps<Config>(s, words, scores, std::make_integer_sequence<int, Config::kTiles>());

  // The lane's own scores [set][group][row g: two columns, row g + 8: two columns].
  float own[kSets][kGroups][4];
#pragma unroll
  for (int u = 0; u < kSets; ++u) {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own[u][k][i] = scores[Config::kCopies * u][k][i];
        if constexpr (Config::kTwins) own[u][k][i] += scores[2 * u + 1][k][i];
      }
      if constexpr (!Config::kZerosOnTensor) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float2 sz = scale_and_zero<Config::kMetadata>(
              key_metadata + (kSetTokens * u + 8 * row) * kMeta + k * 2 * Config::kMetadataBytes);
          key_scale[u][k][row] = sz.x * s.logit_factor;
#pragma unroll
          for (int c = 0; c < 2; ++c) own[u][k][2 * row + c] -= sz.y * s.q_sum[k][c];
        }
      }
    }
  }
  if (valid < Config::kSpanTokens) {
    const int own_row = (Config::kTwins ? t / 2 * 16 : 0) + row_token(lane / 4);
#pragma unroll
    for (int u = 0; u < kSets; ++u) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (own_row + kSetTokens * u + 8 * row >= valid) {
          own[u][0][2 * row] = own[u][0][2 * row + 1] = -INFINITY;
          key_scale[u][0][row] = 1.0f;
        }
      }
    }
  }
  const auto logit = [&](int u, int row, int c, float from) {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      from = fmaf(own[u][k][2 * row + c], key_scale[u][k][row], from);
    }
    return from;
  };

  float2 value_pair[kSets][kGroups][2];
  uint32_t zero_operand[kSets][kGroups][2];
#pragma unroll
  for (int u = 0; u < kSets; ++u) {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint8_t* at = key_metadata + (kPageTokens + kSetTokens * u + 8 * row) * kMeta +
                            k * 2 * Config::kMetadataBytes;
        value_pair[u][k][row] = scale_and_zero<Config::kMetadata>(at);
        if constexpr (Config::kZerosOnTensor) {
          zero_operand[u][k][row] =
              ptx::movmatrix(zero_twice(*reinterpret_cast<const uint32_t*>(at)));
        }
      }
    }
  }

  uint32_t operands[kSets][kGroups][2];  // rounded weights, tokens x columns
  float sum[2], zero_sum[kGroups][2];
  bool raise = fresh;
#pragma unroll 1
  while (true) {
    if (raise) {
      float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int u = 0; u < kSets; ++u) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          float scale = 5.9604645e-8f;
#pragma unroll
          for (int k = 0; k < kGroups; ++k) scale = fmaxf(scale, value_pair[u][k][row].x);
          const float bits = log2f(scale);
#pragma unroll
          for (int c = 0; c < 2; ++c) largest[c] = fmaxf(largest[c], logit(u, row, c, bits));
        }
      }
      s.raise_reference(largest);
    }
    __half2 total;
#pragma unroll
    for (int u = 0; u < kSets; ++u) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float p[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          p[c] = ptx::exp2_approx(logit(u, row, c, -s.reference[c]));
          sum[c] = u + row == 0 ? p[c] : sum[c] + p[c];
        }
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
          const float2 sz = value_pair[u][k][row];
          const __half2 rounded = __floats2half2_rn(p[0] * sz.x, p[1] * sz.x);
          total = u + row + k == 0 ? rounded : __hadd2(total, rounded);
          uint32_t bits;
          memcpy(&bits, &rounded, 4);
          operands[u][k][row] = ptx::movmatrix(bits);
          if constexpr (!Config::kZerosOnTensor) {
            const float2 back = __half22float2(rounded);
            zero_sum[k][0] = u + row == 0 ? back.x * sz.y : zero_sum[k][0] + back.x * sz.y;
            zero_sum[k][1] = u + row == 0 ? back.y * sz.y : zero_sum[k][1] + back.y * sz.y;
          }
        }
      }
    }
    const bool beyond = !__hble2(total, __float2half2_rn(kLargestWeight));
    if (raise || !__any_sync(~0u, beyond)) break;
    raise = true;
  }
  s.sum[0] += sum[0];
  s.sum[1] += sum[1];

#pragma unroll
  for (int u = 0; u < kSets; ++u) {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      if constexpr (Config::kZerosOnTensor) {  // all rows the same, but twins: see settle
        ptx::mma_f16(s.zero_sum[k], zero_operand[u][k][0], 0, zero_operand[u][k][1], 0,
                     operands[u][k][0], operands[u][k][1]);
      } else if (u == 0) {  // holds all sets
        s.zero_sum[k][0] += zero_sum[k][0];
        s.zero_sum[k][1] += zero_sum[k][1];
      }
    }
  }
  // Values are read ahead of the weights, whose chain of instructions is long.
  uint32_t near[Config::kSpanTiles][Layout::kUnits], far[Config::kSpanTiles][Layout::kUnits];
#pragma unroll
  for (int tile = 0; tile < Config::kSpanTiles; ++tile) {
    const uint8_t* rows0 = codes + at.values0 + 16 * tile * kRow;
    const uint8_t* rows1 = codes + at.values1 + 16 * tile * kRow;
    pair_units<Config>(rows0, rows1, near[tile]);
    pair_units<Config>(rows0 + 8 * kRow, rows1 + 8 * kRow, far[tile]);
  }

#pragma unroll
  for (int tile = 0; tile < Config::kSpanTiles; ++tile) {
    uint32_t p[kGroups][2];
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if constexpr (Config::kTwins) {  // columns of the other tile: nothing
          p[k][row] = operands[tile / 2][k][row] * (tile % 2 ? at.odd : at.even);
        } else {
          p[k][row] = operands[tile][k][row];
        }
      }
    }
    value_steps<Config>(s, near[tile], far[tile], p,
                        std::make_integer_sequence<int, Config::kTiles>());
  }
}

}  // namespace oscar
