// Order statistics of rows from their bits: 32 magnitudes become 15 words, one a bit, and a row's
// value of a given rank is found from its highest bit down, a row a lane.
#pragma once

#include "row_codec.cuh"

namespace oscar {

// The 16 x 16 bits in the low halves of the words are transposed, and so are those in the high
// halves: word b then holds bit b of all 32 halves.
__device__ __forceinline__ void transpose_bits(uint32_t (&words)[16]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t a = words[i], b = words[i + 8];
    words[i] = __byte_perm(a, b, 0x6240);
    words[i + 8] = __byte_perm(a, b, 0x7351);
  }
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
    const uint32_t low = step == 4 ? 0x0f0f0f0fu : step == 2 ? 0x33333333u : 0x55555555u;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i & step) continue;
      const uint32_t a = words[i], b = words[i + step];
      words[i] = (a & low) | ((b << step) & ~low);
      words[i + step] = ((a >> step) & low) | (b & ~low);
    }
  }
}

// Planes of 32 rows: the words of a row, kWords of 32 magnitudes each, lie side by side.
template <int kHeadDim>
struct MagnitudePlanes {
  static constexpr int kBits = 15, kWords = kHeadDim / 32;
  uint32_t words[kBits][32][kWords];

  // The bf16 pattern of rank `rank` among the magnitudes of row `row`.
  __device__ __forceinline__ uint32_t pattern_of_rank(int row, int rank) const {
    uint32_t open[kWords], pattern = 0;  // open: magnitudes that agree with the pattern so far
#pragma unroll
    for (int w = 0; w < kWords; ++w) open[w] = ~0u;
#pragma unroll
    for (int bit = kBits - 1; bit >= 0; --bit) {
      uint32_t plane[kWords];
      load(plane, words[bit][row]);
      int below = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) below += __popc(open[w] & ~plane[w]);
      const bool zero = rank < below;
      const uint32_t flip = zero ? ~0u : 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) open[w] &= plane[w] ^ flip;
      rank -= zero ? 0 : below;
      pattern |= zero ? 0 : 1u << bit;
    }
    return pattern;
  }

 private:
  __device__ static __forceinline__ void load(uint32_t (&to)[kWords], const uint32_t* from) {
    if constexpr (kWords == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      to[0] = v.x, to[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(from + i);
        to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
      }
    }
  }
};

}  // namespace oscar
