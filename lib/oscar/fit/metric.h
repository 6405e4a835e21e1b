// What an error of a transformed row costs (math 1.3): M_K, M_V and their feedback factors.
#pragma once

#include <string>
#include <vector>

#include "oscar/fit/fit.h"

namespace oscar {

// Share of the mean diagonal that is added before the metric is factored.
inline constexpr double kMetricDamping = 0.01;

// [d, d] M with e M e^T the cost of an error e = x^ - x of a transformed row, mean diagonal 1:
// keys M = q_rotation^T C_Q q_rotation, values M = o_rotation M_O o_rotation^T, with `partner` the
// stored q_rotation or o_rotation and `weight` the head's own C_Q or M_O. The identity when the
// weight is zero: no error costs anything then, and plain rounding is as good as any. Both products
// from left to right, then the mean of the matrix and its transpose, then the division by the mean
// diagonal, all in one order of operations (fixed_order.h), like the factor below.
MatrixD error_metric(const MatrixF& partner, const MatrixD& weight, Side side);

// [d, d] unit upper triangular U of M + kMetricDamping mean(diag M) I = U D U^T (math 5.1): while
// columns are coded in ascending order, target_i = x_i - sum over j < i of e_j U(j, i). `metric` is
// M as stored, in f32: a bundle that has M leaves U out.
MatrixD feedback_factor(const MatrixD& metric, const std::string& where);

// How a head with this factor rounds. A factor that is absent or the identity pushes no error into
// later columns: plain.
Rounding rounding_of(const MatrixStack<float>& feedback, int head);

// Fills (or clears) `metric` and `feedback` of a side from `weight` [Hkv, d, d], and sets the
// rounding of its recipe to what the factors do.
void set_metric(SideTransform& transform, Side side, const MatrixStack<double>& weight,
                bool with_metric, bool with_feedback, const std::string& where);

}  // namespace oscar
