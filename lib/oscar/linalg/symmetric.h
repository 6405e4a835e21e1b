// Roots and condition numbers of symmetric matrices.
#pragma once

#include <string>

#include "oscar/linalg/eigh.h"

namespace oscar {

// Eigenvalues below `relative_floor` times the largest one, raised to that value (all of them to
// `relative_floor` when the largest is not positive).
VectorD raised_eigenvalues(const VectorD& values, double relative_floor);

// vectors diag(values^exponent) vectors^T; values must be positive when the exponent is negative.
MatrixD symmetric_power(const MatrixD& vectors, const VectorD& values, double exponent);

// Eigenvalues above d * epsilon * the largest one, the accuracy of a float64 decomposition.
int numerical_rank(const VectorD& ascending_values);

// Largest over smallest singular value; infinity for a singular matrix. Accurate up to about 1e7
// (it comes from the eigenvalues of T^T T).
double condition_number(const MatrixD& t, const std::string& where);

}  // namespace oscar
