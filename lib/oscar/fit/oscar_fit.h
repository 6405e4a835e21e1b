// OSCAR's rotation R = U H P (math 3.4), arXiv 2605.17757, of keys and of values alike.
#pragma once

#include "oscar/linalg/eigh.h"

namespace oscar {

struct OscarRotation {
  MatrixD rotation;     // [d, d] orthogonal, x' = x rotation
  VectorD eigenvalues;  // [d] of the moment, ascending: the order of U's columns
};

// U: eigenvectors of a moment [d, d] in ascending order, as `decomposed`; H: `hadamard(d)`; P: the
// bit-reversal shuffle of columns. The moment is C_Q for keys and C_S (or the energy moment) for
// values.
OscarRotation oscar_rotation(const Eigh& decomposed);

}  // namespace oscar
