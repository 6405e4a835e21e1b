// The balanced transforms: not orthogonal, fitted to what varies and to what attention weighs.
//
// A row x' = (x - mean) T is rounded on one scale, so its channels err alike, in proportion to the
// row: E[e_i^2] ~ mean diag(T^T C T). What an error costs is e M e^T with M = T^-1 W T^-T, W = C_Q
// for keys and M_O for values (metric.h). With C^(1/2) W C^(1/2) = V D V^T, every T is
// C^(-1/2) V D^a Q, and for orthogonal Q the channels hold mean(D^2a).
//
// Plain rounding: errors of channels are unrelated and cost mean diag(M), so the loss is
// mean(D^2a) mean(D^(1-2a)), least at a = 1/4; Q = H spreads both evenly (math 6.2).
//
// Shaped rounding (math 6.3) with M = U E U^T: the error of channel i costs E_i, after
// later channels have answered it. Whatever the transform, the product of E is det M, so the loss
// is at least mean(D^2a) det(M)^(1/d), reached by Q = even_cost_mixing(D^(1-2a)), and least for
// a = 0, rows made white. But the errors that are pushed into later channels grow with the spread
// of M and leave the range of four codes, and the condition number grows; measured, a = 0.05 to 0.1
// is best (embedded model, 16 held-out chunks of 4,096, offset 65,536: KL of INT2 keys alone .79,
// of values alone .56 of that with a = 1/4 and H, standard errors .02 and .03).
#pragma once

#include <string>

#include "oscar/linalg/eigh.h"

namespace oscar {

struct BalancedTransform {
  MatrixD forward;  // [d, d] T, x' = (x - mean) T; entries are bf16 numbers
  // [d, d] T^-1 of that rounded T, to the same bits on any machine (fixed_order.h); absent where
  // the condition number is above kLargestCondition.
  MatrixD inverse;
  VectorD eigenvalues;          // [d] D, ascending, small ones raised
  double condition_number = 0;  // cond_2(T)
};

// Eigenvalues of the covariance and of D below this share of the largest are raised to it.
inline constexpr double kBalancedFloor = 1e-6;
// A head whose cond_2(T) is above this is better served by OSCAR's rotation.
inline constexpr double kLargestCondition = 1e3;

// a for plain rounding, and those for shaped rounding in the order in which they are tried: the
// first whose matrices serve in bf16 is taken (checks.h).
inline constexpr double kPlainExponent = 0.25;
inline constexpr double kShapedExponents[] = {0.1, 0.15, 0.25};

// What the transforms of one head have in common.
struct BalancedBasis {
  MatrixD covariance;    // [d, d] C
  MatrixD inverse_root;  // [d, d] C^(-1/2), symmetric
  Eigh product;          // V, and D with small eigenvalues raised
};

// `covariance` is C_K or C_V with its decomposition, `weight` W is C_Q for keys and M_O for values;
// both need a positive trace.
BalancedBasis balanced_basis(const MatrixD& covariance, const Eigh& decomposed,
                             const MatrixD& weight, const std::string& where);

// T = C^(-1/2) V D^a Q, scaled so that mean diag(T^T C T) = 1: for plain rounding with
// kPlainExponent and `hadamard(d)`, no shuffle; for shaped rounding with even_cost_mixing.
// T is rounded to bf16 and then inverted: a server that keeps both matrices in bf16 loses only the
// rounding of the inverse. A singular T has an infinite condition number.
BalancedTransform plain_balanced_transform(const BalancedBasis& basis, const std::string& where);
BalancedTransform shaped_balanced_transform(const BalancedBasis& basis, double exponent,
                                            const std::string& where);

}  // namespace oscar
