// Tokens of an INT2 page: logits, weights and their contribution to the output.
#pragma once

#include <utility>

#include "attention_state.cuh"

namespace oscar {

// Row r (0..7) of a half tile is token row_token(r): even rows are tokens 0..3, so that the four
// value rows a quarter-warp reads together lie in different banks.
__host__ __device__ constexpr int row_token(int r) { return (r >> 1) + 4 * (r & 1); }

template <MetadataDtype kMetadata>
__device__ __forceinline__ float2 load_scale_zero(const uint8_t* address) {
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

// Loads kBytes (4, 8, 16) from shared memory as words.
template <int kCount>
__device__ __forceinline__ void load_words(uint32_t* words, const uint8_t* address) {
  if constexpr (kCount == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(address);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kCount == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(address);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = *reinterpret_cast<const uint32_t*>(address);
  }
}

// Operand register i (unit or word i / 8, code i % 8): calls f<i>(register) for two rows at once.
template <int kStep, int kCount, typename Config, typename State>
__device__ __forceinline__ void key_step(State& s, const uint32_t (*row0)[Config::Layout::kWords],
                                         const uint32_t (*row1)[Config::Layout::kWords],
                                         float (&scores)[kCount][Config::kNT][Config::kGroups][4]) {
  constexpr int i0 = 2 * kStep, w = i0 / 8, j0 = i0 % 8, j1 = j0 + 1;
  constexpr int group = w / Config::Layout::kWordsPerGroup;
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {  // independent chains of accumulation, in turn
    const uint32_t a0 = code_pair<j0>(row0[tile][w], row0[tile][w] >> 6);
    const uint32_t a1 = code_pair<j0>(row1[tile][w], row1[tile][w] >> 6);
    const uint32_t a2 = code_pair<j1>(row0[tile][w], row0[tile][w] >> 6);
    const uint32_t a3 = code_pair<j1>(row1[tile][w], row1[tile][w] >> 6);
#pragma unroll
    for (int n = 0; n < Config::kNT; ++n) {
      ptx::mma_f16(scores[tile][n][group], a0, a1, a2, a3, s.q[n][kStep][0], s.q[n][kStep][1]);
    }
  }
}
template <int kCount, typename Config, typename State, int... kStep>
__device__ __forceinline__ void key_steps(State& s, const uint32_t (*row0)[Config::Layout::kWords],
                                          const uint32_t (*row1)[Config::Layout::kWords],
                                          float (&scores)[kCount][Config::kNT][Config::kGroups][4],
                                          std::integer_sequence<int, kStep...>) {
  (key_step<kStep, kCount, Config>(s, row0, row1, scores), ...);
}

template <int kTile, typename Config, typename State>
__device__ __forceinline__ void value_step(State& s, const uint32_t (&near)[Config::Layout::kUnits],
                                           const uint32_t (&far)[Config::Layout::kUnits],
                                           const uint32_t (&p)[Config::kNT][Config::kGroups][2]) {
  constexpr int i0 = 2 * kTile, u = i0 / 8, j0 = i0 % 8, j1 = j0 + 1;
  constexpr int group = u / Config::Layout::kUnitsPerGroup;
  const uint32_t a0 = code_pair<j0>(near[u], near[u] >> 6);
  const uint32_t a1 = code_pair<j1>(near[u], near[u] >> 6);
  const uint32_t a2 = code_pair<j0>(far[u], far[u] >> 6);
  const uint32_t a3 = code_pair<j1>(far[u], far[u] >> 6);
#pragma unroll
  for (int n = 0; n < Config::kNT; ++n) {
    ptx::mma_f16(s.out[n][kTile], a0, a1, a2, a3, p[n][group][0], p[n][group][1]);
  }
}
template <typename Config, typename State, int... kTile>
__device__ __forceinline__ void value_steps(State& s,
                                            const uint32_t (&near)[Config::Layout::kUnits],
                                            const uint32_t (&far)[Config::Layout::kUnits],
                                            const uint32_t (&p)[Config::kNT][Config::kGroups][2],
                                            std::integer_sequence<int, kTile...>) {
  (value_step<kTile, Config>(s, near, far, p), ...);
}

// Half-words of two tokens side by side: unit u of `first` below that of `second`.
template <typename Config>
__device__ __forceinline__ void pair_units(const uint8_t* first, const uint8_t* second,
                                           uint32_t (&units)[Config::Layout::kUnits]) {
  using Layout = typename Config::Layout;
  if constexpr (Layout::kUnitsPerGroup == 1) {
#pragma unroll
    for (int k = 0; k < Config::kGroups; ++k) {
      const int at = k * Layout::kGroupBytes;
      units[k] = __byte_perm(*reinterpret_cast<const uint16_t*>(first + at),
                             *reinterpret_cast<const uint16_t*>(second + at), 0x5410);
    }
  } else {
    constexpr int kWordsHere = Layout::kUnitsPerGroup / 2;
#pragma unroll
    for (int k = 0; k < Config::kGroups; ++k) {
      uint32_t a[kWordsHere], b[kWordsHere];
      load_words<kWordsHere>(a, first + k * Layout::kGroupBytes);
      load_words<kWordsHere>(b, second + k * Layout::kGroupBytes);
#pragma unroll
      for (int w = 0; w < kWordsHere; ++w) {
        units[k * Layout::kUnitsPerGroup + 2 * w] = __byte_perm(a[w], b[w], 0x5410);
        units[k * Layout::kUnitsPerGroup + 2 * w + 1] = __byte_perm(a[w], b[w], 0x7632);
      }
    }
  }
}

// Inner products of kCount tiles with all columns, times 1 / logit_factor.
// logit[tile][column tile][row g: two columns, row g + 8: two columns]; my_row: this lane's first
// token.
template <typename Config, bool kMasked, int kCount>
__device__ __forceinline__ void key_logits(AttentionState<Config>& s, const uint8_t* chunk,
                                           int my_row, int valid, int t,
                                           float (&logit)[kCount][Config::kNT][4]) {
  using Layout = typename Config::Layout;
  constexpr int kNT = Config::kNT, kGroups = Config::kGroups, kRow = Layout::kRowBytes;
  uint32_t row0[kCount][Layout::kWords], row1[kCount][Layout::kWords];
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      const uint8_t* from = chunk + (my_row + 16 * tile) * kRow + t * 4 * Layout::kWordsPerGroup +
                            k * Layout::kGroupBytes;
      load_words<Layout::kWordsPerGroup>(row0[tile] + k * Layout::kWordsPerGroup, from);
      load_words<Layout::kWordsPerGroup>(row1[tile] + k * Layout::kWordsPerGroup, from + 8 * kRow);
    }
  }
  float scores[kCount][kNT][kGroups][4] = {};
  key_steps<kCount, Config>(s, row0, row1, scores,
                            std::make_integer_sequence<int, Config::kTiles>());
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
    const uint8_t* metadata =
        chunk + 2 * kPageTokens * kRow + (my_row + 16 * tile) * Config::kMetadataRow;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float2 sz = load_scale_zero<Config::kMetadata>(metadata + 8 * row * Config::kMetadataRow +
                                                       k * 2 * Config::kMetadataBytes);
        if (kMasked && my_row + 16 * tile + 8 * row >= valid) sz = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int n = 0; n < kNT; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float inner = scores[tile][n][k][2 * row + c] - sz.y * s.q_sum[n][k][c];
            float& to = logit[tile][n][2 * row + c];
            to = k == 0 ? inner * sz.x : to + inner * sz.x;
          }
        }
      }
    }
  }
}

// Moves the references so that the largest weight of these tokens is at most 2^10. Rare, so it
// computes the logits once more, in a rolled loop.
template <typename Config, bool kMasked>
__device__ __forceinline__ void raise_references(AttentionState<Config>& s, const uint8_t* chunk,
                                                 int first, int count, int valid, int lane) {
  const int g = lane / 4, t = lane % 4;
  float largest[Config::kNT][2];
#pragma unroll
  for (int n = 0; n < Config::kNT; ++n) largest[n][0] = largest[n][1] = -INFINITY;
#pragma unroll 1
  for (int token = first; token < first + count; token += 16) {
    const int my_row = token + row_token(g);
    float logit[1][Config::kNT][4];
    key_logits<Config, kMasked, 1>(s, chunk, my_row, valid, t, logit);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (kMasked && my_row + 8 * row >= valid) continue;
      const uint8_t* metadata = chunk + 2 * kPageTokens * Config::Layout::kRowBytes +
                                (kPageTokens + my_row + 8 * row) * Config::kMetadataRow;
      float scale = load_scale_zero<Config::kMetadata>(metadata).x;
#pragma unroll
      for (int k = 1; k < Config::kGroups; ++k) {
        const uint8_t* other = metadata + k * 2 * Config::kMetadataBytes;
        scale = fmaxf(scale, load_scale_zero<Config::kMetadata>(other).x);
      }
      const float bits = log2f(scale);
#pragma unroll
      for (int n = 0; n < Config::kNT; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          largest[n][c] =
              fmaxf(largest[n][c], logit[0][n][2 * row + c] * s.logit_factor[n][c] + bits);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < Config::kNT; ++n) s.raise_reference(n, largest[n]);
}

// kSpan tiles of 16 tokens from token `first` of the chunk on. kMasked: tokens >= valid are absent
// and whatever their metadata holds is ignored. Everything up to the weights is free of branches,
// so that the tiles' instructions interleave; a weight beyond fp16 shows as an infinite sum, and
// then the references move and the weights are computed again.
template <typename Config, int kSpan, bool kMasked>
__device__ __forceinline__ void int2_tiles(AttentionState<Config>& s, const uint8_t* chunk,
                                           int first, int valid, int lane) {
  using Layout = typename Config::Layout;
  constexpr int kNT = Config::kNT, kGroups = Config::kGroups, kRow = Layout::kRowBytes;
  const int g = lane / 4, t = lane % 4, my_row = first + row_token(g);
  const uint8_t* value_metadata =
      chunk + 2 * kPageTokens * kRow + (kPageTokens + my_row) * Config::kMetadataRow;
  __half2 weight[kSpan][kNT][kGroups][2];  // rounded weights of (row g, row g + 8)
  float sum[kNT][2], zero_sum[kNT][kGroups][2];
#pragma unroll 1
  for (int attempt = 0;; ++attempt) {
    __half2 total = __float2half2_rn(0.0f);
    float logit[kSpan > 1 ? 2 : 1][kNT][4];
#pragma unroll
    for (int n = 0; n < kNT; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        sum[n][c] = 0.0f;
#pragma unroll
        for (int k = 0; k < kGroups; ++k) zero_sum[n][k][c] = 0.0f;
      }
    }
#pragma unroll
    for (int tile = 0; tile < kSpan; ++tile) {
      constexpr int kAtOnce = kSpan > 1 ? 2 : 1;
      if (tile % kAtOnce == 0) {
        key_logits<Config, kMasked, kAtOnce>(s, chunk, my_row + 16 * tile, valid, t, logit);
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int token = 16 * tile + 8 * row;
        const bool absent = kMasked && my_row + token >= valid;
        float2 sz[kGroups];
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
          sz[k] = load_scale_zero<Config::kMetadata>(value_metadata + token * Config::kMetadataRow +
                                                     k * 2 * Config::kMetadataBytes);
          if (absent) sz[k] = make_float2(0.0f, 0.0f);
        }
#pragma unroll
        for (int n = 0; n < kNT; ++n) {
          float p[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            p[c] = ptx::exp2_approx(logit[tile % kAtOnce][n][2 * row + c] * s.logit_factor[n][c] -
                                    s.reference[n][c]);
            if (absent) p[c] = 0.0f;
            sum[n][c] += p[c];
          }
#pragma unroll
          for (int k = 0; k < kGroups; ++k) {
            const __half2 rounded = __floats2half2_rn(p[0] * sz[k].x, p[1] * sz[k].x);
            const float2 back = __half22float2(rounded);
            zero_sum[n][k][0] += back.x * sz[k].y;
            zero_sum[n][k][1] += back.y * sz[k].y;
            total = __hadd2(total, rounded);
            weight[tile][n][k][row] = rounded;
          }
        }
      }
    }
    const bool beyond = !__hble2(total, __float2half2_rn(kLargestWeight));
    if (attempt == 1 || !__any_sync(~0u, beyond)) break;
    raise_references<Config, kMasked>(s, chunk, first, 16 * kSpan, valid, lane);
  }
#pragma unroll
  for (int n = 0; n < kNT; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      s.sum[n][c] += sum[n][c];
#pragma unroll
      for (int k = 0; k < kGroups; ++k) s.zero_sum[n][k][c] += zero_sum[n][k][c];
    }
  }
#pragma unroll
  for (int tile = 0; tile < kSpan; ++tile) {
    uint32_t operands[kNT][kGroups][2];  // tokens x columns
#pragma unroll
    for (int n = 0; n < kNT; ++n) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          uint32_t bits;
          memcpy(&bits, &weight[tile][n][k][row], 4);
          operands[n][k][row] = ptx::movmatrix(bits);
        }
      }
    }
    // After the transposition, operand rows 2t and 2t + 1 are tokens t and t + 4.
    const uint8_t* value_rows =
        chunk + (kPageTokens + first + 16 * tile + t) * kRow + g * 2 * Layout::kUnitsPerGroup;
    uint32_t near[Layout::kUnits], far[Layout::kUnits];
    pair_units<Config>(value_rows, value_rows + 4 * kRow, near);
    pair_units<Config>(value_rows + 8 * kRow, value_rows + 12 * kRow, far);
    value_steps<Config>(s, near, far, operands, std::make_integer_sequence<int, Config::kTiles>());
  }
}

template <typename Config>
__device__ __forceinline__ void full_page(AttentionState<Config>& s, const uint8_t* chunk,
                                          int lane) {
#pragma unroll 1
  for (int first = 0; first < kPageTokens; first += 16 * Config::kSpan) {
    int2_tiles<Config, Config::kSpan, false>(s, chunk, first, kPageTokens, lane);
  }
}

// The first `valid` tokens of a page.
template <typename Config>
__device__ __forceinline__ void partial_page(AttentionState<Config>& s, const uint8_t* chunk,
                                             int valid, int lane) {
#pragma unroll 1
  for (int first = 0; first < valid; first += 16) {
    int2_tiles<Config, 1, true>(s, chunk, first, valid, lane);
  }
}

}  // namespace oscar
