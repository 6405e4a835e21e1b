// How 2-bit codes become tensor-core operands: which lane holds which dimension, at what scale.
//
// A half-word of eight codes, masked with 3 << 2j, is the fp16 subnormal c 4^j 2^-24 for j = 0..4;
// j = 5..7 follow after one shift by six bits. The factor 4^j is taken back on the other operand
// (keys: in Q) or in the result (values: per output row). No subtraction, no conversion.
#pragma once

#include "oscar/cache/pages.h"

namespace oscar {

// Power of four at which code j of a half-word appears.
__host__ __device__ constexpr int position_exponent(int j) { return j < 5 ? j : j - 3; }

// Codes j of both half-words of `word`, as two fp16 values.
template <int j>
__device__ __forceinline__ uint32_t code_pair(uint32_t word, uint32_t shifted) {
  return (j < 5 ? word : shifted) & (0x00030003u << (2 * position_exponent(j)));
}

// Lane = 4 g + t. Keys: lane t of a token's row holds kWords words in each of kGroups groups.
// Values: lane g holds kUnits half-words of eight codes, 16 bytes apart, split over the groups.
template <int kHeadDim, int kGroups>
struct CodeLayout {
  static constexpr int kRowBytes = kHeadDim / 4;
  static constexpr int kGroupBytes = kRowBytes / kGroups;
  static constexpr int kWords = kHeadDim / 64;             // key words per lane and token
  static constexpr int kWordsPerGroup = kWords / kGroups;  // 1, 2 or 4
  static constexpr int kUnits = kHeadDim / 64;
  static constexpr int kUnitsPerGroup = kUnits / kGroups;
  static constexpr int kTiles = kHeadDim / 16;  // k-steps of Q K^T, row tiles of P V

  // Lane t's key dimensions are kKeyRuns runs of kKeyRun consecutive ones; run r begins at
  // key_run_dim(t, r). Code j in half `half` of key word `word` is number key_index of them.
  static constexpr int kKeyRuns = kGroups;
  static constexpr int kKeyRun = kHeadDim / 4 / kKeyRuns;
  __host__ __device__ static constexpr int key_run_dim(int t, int run) {
    return run * (kHeadDim / kKeyRuns) + t * kKeyRun;
  }
  __host__ __device__ static constexpr int key_index(int word, int j, int half) {
    return 16 * word + 8 * half + j;
  }
  // The same for the values of lane g; operand register i holds unit i / 8, code i % 8. Register
  // 2 m is row g of row tile m, register 2 m + 1 is row g + 8.
  static constexpr int kValueRuns = kUnits;
  static constexpr int kValueRun = kHeadDim / 8 / kValueRuns;
  __host__ __device__ static constexpr int value_run_dim(int g, int run) {
    return run * (kHeadDim / kValueRuns) + g * kValueRun;
  }
  __host__ __device__ static constexpr int value_dim(int g, int i) {
    return value_run_dim(g, i / kValueRun) + i % kValueRun;
  }
};

}  // namespace oscar
