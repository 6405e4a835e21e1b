// Moments of rotated vectors averaged over the positions that will be served (math 8).
//
// Queries and keys are collected after RoPE, at the positions of the calibration chunks. With D(p)
// the rotation by p further positions, a moment M becomes D(p)^T M D(p) and a sum s becomes s D(p).
// Their means over p need only the mean phases of sums and differences of RoPE's frequencies.
#pragma once

#include <complex>
#include <cstdint>
#include <functional>

#include "oscar/checkpoint/rope.h"
#include "oscar/linalg/tensor.h"

namespace oscar {

// Mean over a set of offsets p of exp(i omega p), omega in radians per position.
using MeanPhase = std::function<std::complex<double>(double omega)>;

// Over every whole offset p = 0, 1, ..., span, from the closed form of the geometric sum. A span
// below 63 is taken in 64 equal steps instead, both ends included. span >= 0.
MeanPhase mean_phase_of_span(int64_t span);

// Over the offsets of rows that a server writes (math 8.3): every request fills its cache from
// position 0, and few reach the last ones. kEarlyShare of the weight lies evenly on the first
// kEarlyPart of [0, span], the rest evenly on all of it. span >= 0.
inline constexpr double kEarlyShare = 0.25, kEarlyPart = 1.0 / 16;
MeanPhase mean_phase_of_served(int64_t span);

// The same weights, in whole segments of kSegmentTokens positions, and the mean taken over the
// middles of these segments only. Times segment_phase(omega) it is the mean over all their
// positions.
MeanPhase mean_phase_of_segments(int64_t span);
// Mean of exp(i omega (p - middle)) over the positions p of a segment: real, 1 at omega 0.
double segment_phase(double omega);
// The position in the middle of a segment.
double segment_middle(int64_t segment);
// At one position alone.
MeanPhase phase_at(double position);

// The offset below which `share` in [0, 1] of that weight lies.
double served_position(double share, int64_t span);

// [d, d] mean of D(p)^T M D(p), M = sum of x^T x with rows x of d entries. Dimensions from
// rope.rotary_dim on pass through. Throws Error when `rope` does not fit d.
MatrixD average_moment(const MatrixD& moment, const Rope& rope, const MeanPhase& mean_phase);

// [d] mean of s D(p), s = sum of x.
VectorD average_sum(const VectorD& sum, const Rope& rope, const MeanPhase& mean_phase);

}  // namespace oscar
