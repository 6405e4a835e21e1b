// The numerical checks that a bundle's transforms must pass, when fitted and when loaded.
#pragma once

#include <string>
#include <vector>

#include "oscar/fit/fit.h"

namespace oscar {

// Largest absolute entries allowed (math 12.5).
inline constexpr double kInverseLimit = 1e-5;              // as stored, f32
inline constexpr double kInverseLimitBf16 = 5e-3;          // rounded to bf16, orthogonal heads
inline constexpr double kInverseLimitBf16Balanced = 2e-2;  // rounded to bf16, balanced heads

// Largest absolute entries of one head's deviations from the identity.
struct TransformDeviation {
  double inverse = 0;        // q_rotation^T k_rotation - I, or v_rotation o_rotation - I
  double inverse_bf16 = 0;   // the same after rounding both matrices to bf16
  double orthogonality = 0;  // forward^T forward - I; 0 for balanced heads
};

// `forward` and `partner` [d, d] as stored.
TransformDeviation transform_deviation(const MatrixF& forward, const MatrixF& partner, Side side,
                                       TransformKind kind);

// [Hkv] deviations of a whole side.
std::vector<TransformDeviation> transform_deviations(const SideTransform& transform, Side side);

// "" when `deviation` is within the limits of `kind`, else what is wrong, with both numbers.
std::string deviation_problem(const TransformDeviation& deviation, TransformKind kind);

// A search tries some ten.
inline constexpr uint64_t kMostClipRatios = 1024;

// "" when `losses` are those of `heads` heads: 1 to kMostClipRatios ratios, each within 0 and 1 and
// there once, and of each finite losses that are not negative. Else what is wrong.
std::string clip_losses_problem(const ClipLosses& losses, int heads);

// Throws Error, naming `where` and the head, when a deviation is over its limit, an entry is not
// finite, eigenvalues are not ascending or a feedback factor is not unit upper triangular.
void require_valid(const SideTransform& transform, Side side, const std::string& where);

}  // namespace oscar
