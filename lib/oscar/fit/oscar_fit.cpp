// Composition of OSCAR's rotation: eigenvectors, Hadamard, shuffle of columns.
#include "oscar/fit/oscar_fit.h"

#include "oscar/linalg/bit_reversal.h"
#include "oscar/linalg/hadamard.h"

namespace oscar {

OscarRotation oscar_rotation(const Eigh& decomposed) {
  const int d = static_cast<int>(decomposed.values.size());
  const MatrixD mixed = decomposed.vectors * hadamard(d);
  const std::vector<int> perm = bit_reversal_permutation(d);
  OscarRotation result{MatrixD(d, d), decomposed.values};
  for (int c = 0; c < d; ++c) result.rotation.col(c) = mixed.col(perm[c]);
  return result;
}

}  // namespace oscar
