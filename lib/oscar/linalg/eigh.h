// Eigen-decomposition of small symmetric matrices, reproducible to the byte on one machine
// (math 3.1).
#pragma once

#include <string>

#include "oscar/linalg/tensor.h"

namespace oscar {

struct Eigh {
  VectorD values;   // [d] ascending
  MatrixD vectors;  // [d, d] eigenvectors as columns, in the order of `values`
};

// A = U diag(values) U^T by LAPACK's dsyevd, on (A + A^T) / 2 formed in float64, one thread a call;
// calls from several threads run side by side.
// Order: ascending; columns of bit-equal eigenvalues by the row of their largest-magnitude entry.
// Sign: the largest-magnitude entry of each column is positive; of entries whose magnitudes are
// bit-equal the lowest row counts (no tolerance is involved).
// `where` names the matrix in errors. Throws Error when A is not finite or dsyevd fails.
Eigh eigh(const MatrixD& a, const std::string& where);

// The eigenvalues alone [d], ascending, in a fraction of the time; within rounding those of `eigh`.
VectorD eigenvalues(const MatrixD& a, const std::string& where);

// Applies the order and sign rules of `eigh` in place.
void canonicalise(Eigh& e);

// Path of the shared library whose dsyevd `eigh` calls. Throws Error when it cannot be loaded.
std::string lapack_provider();

}  // namespace oscar
