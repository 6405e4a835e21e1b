// The balanced transform: not orthogonal, equal error per direction as attention weighs it.
#pragma once

#include <string>

#include "oscar/linalg/tensor.h"

namespace oscar {

struct BalancedTransform {
  MatrixD forward;              // [d, d] T, x' = (x - mean) T; entries are bf16 numbers
  MatrixD inverse;              // [d, d] T^-1 of that rounded T
  VectorD eigenvalues;          // [d] D, ascending, small ones raised
  double condition_number = 0;  // cond_2(T)
};

// Eigenvalues of the covariance and of D below this share of the largest are raised to it.
inline constexpr double kBalancedFloor = 1e-6;
// A head whose cond_2(T) is above this is better served by OSCAR's rotation.
inline constexpr double kLargestCondition = 1e3;

// T = C^(-1/2) W D^(1/4) H with C^(1/2) M C^(1/2) = W D W^T, symmetric roots, W ascending, H =
// `hadamard(d)` and no shuffle, scaled so that mean diag(T^T C T) = 1. `covariance` is C_K or C_V,
// `weight` M is C_Q for keys and M_O for values; both need a positive trace.
// T is rounded to bf16 and then inverted: a server that keeps both matrices in bf16 loses only the
// rounding of the inverse. A singular T has an infinite condition number.
BalancedTransform balanced_transform(const MatrixD& covariance, const MatrixD& weight,
                                     const std::string& where);

}  // namespace oscar
