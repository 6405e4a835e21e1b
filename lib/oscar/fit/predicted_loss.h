// What writing rows with a transform will cost, predicted from moments (math 10.1): to compare
// transforms of one head before anything is quantized.
//
// A row x' = (x - mean) T of d channels is rounded on one scale, so all its channels err about
// alike and in proportion to the row: E[e_i^2] ~ mean diag(T^T C T), C being the second moment of x
// about `mean`. An error costs e M e^T (metric.h) with M = P^T W P for keys (P = q_rotation,
// W = C_Q) and P W P^T for values (P = o_rotation, W = M_O); errors of different channels taken as
// unrelated leave mean diag(M). Up to a factor that depends on the rounding alone,
//
//     loss = mean diag(T^T C T) * mean diag(M).
//
// The balanced transform of plain rounding (balanced_fit.h) is the T that minimises this product
// (math 6.2), at (tr (C^1/2 W C^1/2)^1/2 / d)^2, so around it the loss of a wrong T grows with the
// square of what is wrong.
//
// Limits. Only ratios between transforms of one head and side mean anything. Clipping, rows that
// are not normal, shaped rounding (whose loss has det(M)^(1/d) for mean diag(M)) and the exact
// windows are left out. All rotations with one centre score alike, because they keep both traces:
// this cannot rank them, or tell how well their columns spread outliers.
#pragma once

#include <vector>

#include "oscar/fit/moments.h"

namespace oscar {

// The fit by which texts are judged: of every head the balanced transform for plain rounding, which
// follows the statistics most closely and minimises this loss. Row weights, centering and positions
// are those of `run`.
FitOptions judging_fit(const FitOptions& run);

// Moments to score transforms with: layer_moments, always centred. Errors as there.
LayerMoments scoring_moments(const LayerStatistics& statistics, FitOptions options,
                             const Rope& rope);

// [Hkv] losses of `transform` under scoring_moments of its shape. The transform may have another
// mean than they have: then C is taken about that one.
std::vector<double> predicted_losses(const SideTransform& transform, Side side,
                                     const LayerMoments& moments);

// [Hkv] the same over `own`, the losses of another transform under the same moments. 1 for a head
// of which `own` is 0, its errors costing nothing or its rows not varying: it has nothing to lose.
std::vector<double> loss_ratios(const SideTransform& transform, Side side,
                                const LayerMoments& moments, const std::vector<double>& own);

}  // namespace oscar
