// Construction of the (block) Hadamard matrix from Sylvester's closed form.
#include "oscar/linalg/hadamard.h"

#include <bit>
#include <cmath>

namespace oscar {

int hadamard_block_size(int d) {
  assert(d > 0);
  return d & -d;
}

MatrixD hadamard(int d) {
  const int block = hadamard_block_size(d), num_blocks = d / block;
  const double magnitude = 1.0 / std::sqrt(static_cast<double>(block));
  MatrixD h = MatrixD::Zero(d, d);
  for (int i = 0; i < d; ++i) {
    const unsigned row = static_cast<unsigned>(i / num_blocks);
    const int first = (i % num_blocks) * block;
    for (int j = 0; j < block; ++j) {
      const bool negative = std::popcount(row & static_cast<unsigned>(j)) % 2 != 0;
      h(i, first + j) = negative ? -magnitude : magnitude;
    }
  }
  return h;
}

}  // namespace oscar
