// A span of tokens of an INT2 page: logits, weights and their contribution to the output.
#pragma once

#include <utility>

#include "attention_state.cuh"

namespace oscar {

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

// The span's key operands of step kStep, sixteen dimensions of every tile.
template <int kStep, typename Config>
__device__ __forceinline__ void key_operands(
    const uint32_t (&words)[Config::kSpanTiles][2][Config::Layout::kWords],
    uint32_t (&a)[Config::kSpanTiles][4]) {
  constexpr int i0 = 2 * kStep, w = i0 / 8, j0 = i0 % 8, j1 = j0 + 1;
#pragma unroll
  for (int tile = 0; tile < Config::kSpanTiles; ++tile) {
    const uint32_t near = words[tile][0][w], far = words[tile][1][w];
    a[tile][0] = code_pair<j0>(near, near >> 6), a[tile][1] = code_pair<j0>(far, far >> 6);
    a[tile][2] = code_pair<j1>(near, near >> 6), a[tile][3] = code_pair<j1>(far, far >> 6);
  }
}

// Products of steps kStep and up; a: the operands of step kStep. Those of the next step come before
// this one's products: in the other order the compiler lets each product wait for its operands.
template <int kStep, typename Config>
__device__ __forceinline__ void key_steps(
    const AttentionState<Config>& s,
    const uint32_t (&words)[Config::kSpanTiles][2][Config::Layout::kWords],
    const uint32_t (&a)[Config::kSpanTiles][4],
    float (&scores)[Config::kSpanTiles][Config::kGroups][4]) {
  constexpr int group = kStep / 4 / Config::Layout::kWordsPerGroup;
  uint32_t next[Config::kSpanTiles][4];
  if constexpr (kStep + 1 < Config::kTiles) key_operands<kStep + 1, Config>(words, next);
#pragma unroll
  for (int tile = 0; tile < Config::kSpanTiles; ++tile) {
    ptx::mma_f16(scores[tile][group], a[tile][0], a[tile][1], a[tile][2], a[tile][3], s.q[kStep][0],
                 s.q[kStep][1]);
  }
  if constexpr (kStep + 1 < Config::kTiles) key_steps<kStep + 1, Config>(s, words, next, scores);
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

// Half-words of tokens 2t and 2t + 1 of a half tile side by side, which is what transposing 8 x 8
// of them gives: near those of the first half, far of the second. address: see SpanOffsets.
template <typename Config>
__device__ __forceinline__ void pair_units(uint32_t address,
                                           uint32_t (&near)[Config::Layout::kUnits],
                                           uint32_t (&far)[Config::Layout::kUnits]) {
  if constexpr (Config::Layout::kUnits == 1) {
    ptx::ldmatrix_x2_trans(near[0], far[0], address);
  } else {
#pragma unroll
    for (int u = 0; u < Config::Layout::kUnits; u += 2) {
      uint32_t r[4];
      ptx::ldmatrix_x4_trans(r, address + 16 * u);
      near[u] = r[0], near[u + 1] = r[1], far[u] = r[2], far[u + 1] = r[3];
    }
  }
}

// Two halves of the metadata pair, the zero in both.
__device__ __forceinline__ uint32_t zero_twice(uint32_t scale_zero) {
  return __byte_perm(scale_zero, scale_zero, 0x3232);
}

// Sets the metadata of absent tokens to zero, so that whatever lies there cannot reach a sum.
template <typename Config>
__device__ __forceinline__ void clear_absent_metadata(uint8_t* page_data, int valid, int lane) {
  constexpr int kRowWords = Config::kMetadataRow / 4;
  uint32_t* words =
      reinterpret_cast<uint32_t*>(page_data + 2 * kPageTokens * Config::Layout::kRowBytes);
#pragma unroll 1
  for (int i = valid * kRowWords + lane; i < kPageTokens * kRowWords; i += 32) {
    words[i] = words[kPageTokens * kRowWords + i] = 0;
  }
  ptx::fence_shared_before_copies();
  __syncwarp();
}

// Where a lane reads in a page, in bytes. Rows g and g + 8 of a tile are its own in keys, with
// metadata of the tile whose scores it has; of values it names a row to the others.
struct SpanOffsets {
  int keys, metadata, values;
};

template <typename Config>
__device__ __forceinline__ SpanOffsets span_offsets(int lane) {
  using Layout = typename Config::Layout;
  const int g = lane / 4, t = lane % 4;
  // Matrices of 8 rows x 16 bytes: with one unit near, far; else near, near + 16, far, far + 16.
  const int matrix = lane / 8, half = Layout::kUnits == 1 ? matrix % 2 : matrix / 2;
  SpanOffsets at;
  at.keys = g * Layout::kRowBytes + t * 4 * Layout::kWordsPerGroup;
  at.metadata = 2 * kPageTokens * Layout::kRowBytes +
                ((Config::kPairedTiles ? t / 2 * 16 : 0) + g) * Config::kMetadataRow;
  at.values = (kPageTokens + 8 * half + lane % 8) * Layout::kRowBytes +
              (Layout::kUnits == 1 ? 0 : matrix % 2 * 16);
  // Opaque, or the compiler derives them anew for every span; through a shuffle its last stage does
  // not see either, which takes registers that head_dim 64 with eight columns does not have.
  asm volatile("" : "+r"(at.keys), "+r"(at.metadata), "+r"(at.values));
  if constexpr (Config::kPairedTiles || Config::kHeadDim > 64) {
    at.keys = __shfl_sync(~0u, at.keys, lane);
    at.metadata = __shfl_sync(~0u, at.metadata, lane);
    at.values = __shfl_sync(~0u, at.values, lane);
  }
  return at;
}

// What of a span is left to do: its value codes and rounded weights.
template <typename Config>
struct SpanValues {
  uint32_t near[Config::kSpanTiles][Config::Layout::kUnits];
  uint32_t far[Config::kSpanTiles][Config::Layout::kUnits];
  uint32_t weights[Config::kSpanTiles / Config::kSetTiles][Config::kGroups][2];
};

// Adds the values of a span to the output.
template <typename Config>
__device__ __forceinline__ void add_values(AttentionState<Config>& s, const SpanValues<Config>& v) {
#pragma unroll
  for (int tile = 0; tile < Config::kSpanTiles; ++tile) {
    uint32_t p[Config::kGroups][2];
#pragma unroll
    for (int k = 0; k < Config::kGroups; ++k) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        p[k][row] = v.weights[tile / Config::kSetTiles][k][row];
        // Columns 4 to 7 are the odd tile's; what they give in the other places is never read.
        if (Config::kPairedTiles && tile % 2) p[k][row] = __shfl_xor_sync(~0u, p[k][row], 16);
      }
    }
    value_steps<Config>(s, v.near[tile], v.far[tile], p,
                        std::make_integer_sequence<int, Config::kTiles>());
  }
}

// Logits and weights of span `span`, kSpanTokens tokens, of a page, and its values into v.
// kPartial: of the tokens those >= valid are absent and their metadata is zero. A weight beyond
// fp16, which any is as long as there is no reference, shows as a sum beyond kLargestWeight; then
// the references move and the weights are computed again. loaded() follows the first loads: it may
// use v of the span before, and hides what they wait for.
template <typename Config, bool kPartial, typename Loaded>
__device__ __forceinline__ void weigh_span(AttentionState<Config>& s, const uint8_t* page_data,
                                           int span, const SpanOffsets& at, int valid, int lane,
                                           SpanValues<Config>& v, Loaded loaded) {
  using Layout = typename Config::Layout;
  constexpr int kGroups = Config::kGroups, kRow = Layout::kRowBytes;
  constexpr int kSets =
      Config::kSpanTiles / Config::kSetTiles;  // of tiles: a lane has one's scores
  constexpr int kSetTokens = 16 * Config::kSetTiles;
  constexpr int kMeta = Config::kMetadataRow;
  const int t = lane % 4;
  const uint8_t* codes = page_data + span * Config::kSpanTokens * kRow;
  const uint8_t* key_metadata = page_data + span * Config::kSpanTokens * kMeta + at.metadata;
  const uint8_t* key_rows = codes + at.keys;
  const uint32_t value_rows = ptx::shared_address(codes) + at.values;

  // Of each tile, row g: two columns, row g + 8: two columns.
  float tile_scores[Config::kSpanTiles][kGroups][4] = {};
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
  loaded();
  float key_scale[kSets][kGroups][2];
  float center_sign[kSets][2];  // of a key's first scale: which center it has
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
          const float scale = __low2float(pair);
          if (k == 0) center_sign[u][row] = copysignf(1.0f, scale);
          key_scale[u][k][row] = fabsf(scale) * s.logit_factor;
          const __half2 zero = __hmul2(__high2half2(pair), parts);
          memcpy(&zeros[row], &zero, 4);
        }
        float(&from)[4] = tile_scores[Config::kSetTiles * u][k];
        ptx::mma_f16_k8(from, zeros[0], zeros[1], s.zero_queries[k]);
#pragma unroll
        for (int i = 0; i < 4; ++i) tile_scores[Config::kSetTiles * (u + 1) - 1][k][i] = from[i];
      }
    }
  }
  uint32_t first_operands[Config::kSpanTiles][4];
  key_operands<0, Config>(words, first_operands);
  key_steps<0, Config>(s, words, first_operands, tile_scores);
#pragma unroll
  for (int tile = 0; tile < Config::kSpanTiles; ++tile) {
    pair_units<Config>(value_rows + 16 * tile * kRow, v.near[tile], v.far[tile]);
  }
  float scores[kSets][kGroups][4];  // of the tile whose metadata the lane has
#pragma unroll
  for (int u = 0; u < kSets; ++u) {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[u][k][i] = tile_scores[Config::kSetTiles * u][k][i];
        if (Config::kPairedTiles && t >= 2)
          scores[u][k][i] = tile_scores[Config::kSetTiles * (u + 1) - 1][k][i];
      }
    }
  }

  if constexpr (!Config::kZerosOnTensor) {
#pragma unroll
    for (int u = 0; u < kSets; ++u) {
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const float2 sz = scale_and_zero<Config::kMetadata>(
              key_metadata + (kSetTokens * u + 8 * row) * kMeta + k * 2 * Config::kMetadataBytes);
          if (k == 0) center_sign[u][row] = copysignf(1.0f, sz.x);
          key_scale[u][k][row] = fabsf(sz.x) * s.logit_factor;
#pragma unroll
          for (int c = 0; c < 2; ++c) scores[u][k][2 * row + c] -= sz.y * s.q_sum[k][c];
        }
      }
    }
  }
  if (kPartial) {
    const int own_row = (Config::kPairedTiles ? t / 2 * 16 : 0) + lane / 4;
#pragma unroll
    for (int u = 0; u < kSets; ++u) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (own_row + kSetTokens * u + 8 * row >= valid) {
          scores[u][0][2 * row] = scores[u][0][2 * row + 1] = -INFINITY;
          key_scale[u][0][row] = 1.0f;
        }
      }
    }
  }
  // from: what is added, but for half of what the centers differ by.
  const auto logit = [&](int u, int row, int c, float from, float half) {
    from = fmaf(center_sign[u][row], half, from);
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      from = fmaf(scores[u][k][2 * row + c], key_scale[u][k][row], from);
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

  float sum[2], zero_sum[kGroups][2];
  const auto weigh = [&]() {  // whether a weight is beyond fp16
    __half2 total;
    const float4 centers = *s.center_logits;
    const float from[2] = {centers.x - s.reference[0], centers.z - s.reference[1]};
    const float half[2] = {centers.y, centers.w};
#pragma unroll
    for (int u = 0; u < kSets; ++u) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float p[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          p[c] = ptx::exp2_approx(logit(u, row, c, from[c], half[c]));
          sum[c] = u + row == 0 ? p[c] : sum[c] + p[c];
        }
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
          const float2 sz = value_pair[u][k][row];
          const __half2 rounded = __floats2half2_rn(p[0] * sz.x, p[1] * sz.x);
          total = u + row + k == 0 ? rounded : __hadd2(total, rounded);
          uint32_t bits;
          memcpy(&bits, &rounded, 4);
          v.weights[u][k][row] = ptx::movmatrix(bits);
          if constexpr (!Config::kZerosOnTensor) {
            const float2 back = __half22float2(rounded);
            zero_sum[k][0] = u + row == 0 ? back.x * sz.y : zero_sum[k][0] + back.x * sz.y;
            zero_sum[k][1] = u + row == 0 ? back.y * sz.y : zero_sum[k][1] + back.y * sz.y;
          }
        }
      }
    }
    return !__hble2(total, __float2half2_rn(kLargestWeight));
  };
  if (__any_sync(~0u, weigh())) {
    float largest[2] = {-INFINITY, -INFINITY};
    const float4 centers = *s.center_logits;
#pragma unroll
    for (int u = 0; u < kSets; ++u) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float scale = 5.9604645e-8f;
#pragma unroll
        for (int k = 0; k < kGroups; ++k) scale = fmaxf(scale, value_pair[u][k][row].x);
        const float bits = __log2f(scale);  // near enough for a reference
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float from = (c ? centers.z : centers.x) + bits;
          largest[c] = fmaxf(largest[c], logit(u, row, c, from, c ? centers.w : centers.y));
        }
      }
    }
    s.raise_reference(largest);
    weigh();
  }
  s.sum[0] += sum[0];
  s.sum[1] += sum[1];

#pragma unroll
  for (int u = 0; u < kSets; ++u) {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      if constexpr (Config::kZerosOnTensor) {  // all rows the same, but paired tiles: see settle
        ptx::mma_f16(s.zero_sum[k], zero_operand[u][k][0], 0, zero_operand[u][k][1], 0,
                     v.weights[u][k][0], v.weights[u][k][1]);
      } else if (u == 0) {  // holds all sets
        s.zero_sum[k][0] += zero_sum[k][0];
        s.zero_sum[k][1] += zero_sum[k][1];
      }
    }
  }
}

}  // namespace oscar
