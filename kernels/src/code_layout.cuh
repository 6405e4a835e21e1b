// How 2-bit codes become tensor-core operands: which lane holds which dimension, at what scale.
//
// A half-word of eight codes, masked with 3 << 2j, is the fp16 subnormal c 4^j 2^-24 for j = 0..4;
// j = 5..7 follow after one shift by six bits. The factor 4^j is taken back on the other operand
// (keys: in Q) or in the result (values: per output row). No subtraction, no conversion.
#pragma once

#include "oscar/cache/page_layout.h"

namespace oscar {

// Power of four at which code j of a half-word appears.
__host__ __device__ constexpr int position_exponent(int j) { return j < 5 ? j : j - 3; }

// Codes j of both half-words of `word`, as two fp16 values.
template <int j>
__device__ __forceinline__ uint32_t code_pair(uint32_t word, uint32_t shifted) {
  return (j < 5 ? word : shifted) & (0x00030003u << (2 * position_exponent(j)));
}

// Dimension of code `position` (0..3) of byte `byte` of a packed row.
template <int kHeadDim, PackOrder kOrder>
__host__ __device__ constexpr int dim_of_code(int byte, int position) {
  return kOrder == PackOrder::kConsecutive ? 4 * byte + position : byte + kHeadDim / 4 * position;
}

// Lane = 4 g + t. Keys: lane t of a token's row holds kWords words in each of kGroups groups.
// Values: lane g holds kUnits half-words (eight dimensions each), split over the groups.
template <int kHeadDim, int kGroups, PackOrder kOrder>
struct CodeLayout {
  static_assert(kOrder == PackOrder::kConsecutive || kGroups == 1,
                "the quartered order spreads a group over all bytes");
  static constexpr int kRowBytes = kHeadDim / 4;
  static constexpr int kGroupBytes = kRowBytes / kGroups;
  static constexpr int kWords = kHeadDim / 64;             // key words per lane and token
  static constexpr int kWordsPerGroup = kWords / kGroups;  // 1, 2 or 4
  static constexpr int kUnits = kHeadDim / 64;
  static constexpr int kUnitsPerGroup = kUnits / kGroups;
  static constexpr int kTiles = kHeadDim / 16;  // k-steps of Q K^T, row tiles of P V

  __host__ __device__ static constexpr int key_word_byte(int t, int word) {
    return word / kWordsPerGroup * kGroupBytes + t * 4 * kWordsPerGroup + word % kWordsPerGroup * 4;
  }
  // Dimension of code j in half `half` of key word `word` of lane t.
  __host__ __device__ static constexpr int key_dim(int t, int word, int j, int half) {
    return dim_of_code<kHeadDim, kOrder>(key_word_byte(t, word) + 2 * half + j / 4, j % 4);
  }
  __host__ __device__ static constexpr int value_unit_byte(int g, int unit) {
    return unit / kUnitsPerGroup * kGroupBytes + g * 2 * kUnitsPerGroup + unit % kUnitsPerGroup * 2;
  }
  // Dimension of operand register i (unit i / 8, code i % 8) of lane g. Register 2 m is row g of
  // row tile m, register 2 m + 1 is row g + 8.
  __host__ __device__ static constexpr int value_dim(int g, int i) {
    return dim_of_code<kHeadDim, kOrder>(value_unit_byte(g, i / 8) + i % 8 / 4, i % 8 % 4);
  }
};

}  // namespace oscar
