// Order statistics and packing of single rows.
#include "oscar/cache/codec.h"

#include <algorithm>
#include <cassert>
#include <cmath>

namespace oscar {

float magnitude_of_rank(const float* x, int head_dim, int rank) {
  assert(head_dim <= kMaxHeadDim && rank >= 0 && rank < head_dim);
  float magnitudes[kMaxHeadDim];
  for (int i = 0; i < head_dim; ++i) magnitudes[i] = std::fabs(x[i]);
  std::nth_element(magnitudes, magnitudes + rank, magnitudes + head_dim);
  return magnitudes[rank];
}

void pack_row(const uint8_t* codes, int head_dim, PackOrder order, uint8_t* packed) {
  std::fill(packed, packed + head_dim / 4, uint8_t{0});
  for (int i = 0; i < head_dim; ++i) {
    packed[packed_byte(i, head_dim, order)] |=
        static_cast<uint8_t>(codes[i] << packed_shift(i, head_dim, order));
  }
}

void unpack_row(const uint8_t* packed, int head_dim, PackOrder order, uint8_t* codes) {
  for (int i = 0; i < head_dim; ++i) {
    codes[i] = static_cast<uint8_t>(unpack_code(packed, i, head_dim, order));
  }
}

}  // namespace oscar
