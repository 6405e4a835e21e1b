// OSCAR's rotation R = U H P (arXiv 2605.17757), of keys and of values alike.
#pragma once

#include <string>

#include "oscar/linalg/eigh.h"

namespace oscar {

struct OscarRotation {
  MatrixD rotation;     // [d, d] orthogonal, x' = x rotation
  VectorD eigenvalues;  // [d] of the moment, ascending: the order of U's columns
};

// U: eigenvectors of `moment` [d, d] in ascending order (`eigh`), H: `hadamard(d)`, P: the
// bit-reversal shuffle of columns. The moment is C_Q for keys and C_S (or the energy moment) for
// values. `where` names it in errors.
OscarRotation oscar_rotation(const MatrixD& moment, const std::string& where);

// The same from the moment's decomposition.
OscarRotation oscar_rotation(const Eigh& decomposed);

}  // namespace oscar
