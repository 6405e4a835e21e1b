// How far two subspaces lie apart.
#pragma once

#include <string>

#include "oscar/linalg/eigh.h"

namespace oscar {

// Fewest leading eigenvectors (the last columns) that hold `share` of the sum of the positive
// eigenvalues, ascending; 0 when none is positive.
int leading_dimensions(const VectorD& eigenvalues, double share);

// Principal angles between the column spaces of A [d, r] and B [d, s], both orthonormal, in radians
// and ascending; min(r, s) of them. Their cosines are the singular values of A^T B (Bjorck and
// Golub 1973), which come from LAPACK's eigenvalues of (A^T B)^T (A^T B): angles below 1e-8 are
// rounding. `where` names the matrices in errors.
VectorD principal_angles(const MatrixD& a, const MatrixD& b, const std::string& where);

}  // namespace oscar
