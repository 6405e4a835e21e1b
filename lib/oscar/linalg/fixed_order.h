// Product, inverse and triangular factor in one order of operations, so that any machine gets the
// same bits.
//
// Each step is one multiplication, division or subtraction of doubles, rounded by itself (IEEE 754,
// nearest even; the build turns off contraction into fused operations). Elements of one step don't
// depend on each other: vector units change nothing, and numpy arrays of many matrices give the
// same bits (python/oscar_int2/derived.py). What a bundle leaves out is derived with these.
#pragma once

#include <string>

#include "oscar/linalg/tensor.h"

namespace oscar {

// A B: entry (i, j) begins as 0, and A(i, k) * B(k, j) is added for k from 0 on.
MatrixD fixed_order_product(const MatrixD& a, const MatrixD& b);

// The sum of the diagonal from its first entry to its last, over d.
double fixed_order_mean_diagonal(const MatrixD& a);

// A^-1 [d, d] by Gauss-Jordan elimination. For k from 0 to d - 1: of rows k to d - 1 the first with
// the largest |A(i, k)| changes places with row k; p = A(k, k), A(k, k) = 1, row k is divided by p;
// for every other row i: f = A(i, k), A(i, k) = 0, row i becomes row i - f * row k. At the end, for
// k from d - 1 to 0, column k changes places with the column of the row that step k took. Throws
// Error naming `where` when a pivot is 0 or not finite.
MatrixD fixed_order_inverse(MatrixD a, const std::string& where);

// Unit upper triangular U of M = U D U^T, D diagonal and positive, from M's upper triangle. For j
// from d - 1 to 0: D_j = M(j, j), and for i < j U(i, j) = M(i, j) / D_j; then for i <= k < j
// M(i, k) becomes M(i, k) - U(i, j) * M(k, j). Throws Error naming `where` when a D_j is not
// positive or not finite.
MatrixD udu_factor(MatrixD m, const std::string& where);

}  // namespace oscar
