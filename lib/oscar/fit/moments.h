// The moments that follow from the sums of a calibration, averaged over served positions (math
// 3).
#pragma once

#include <complex>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "oscar/fit/fit.h"
#include "oscar/fit/linalg.h"
#include "oscar/model/checkpoint/rope.h"

namespace oscar {

// Second moments and means as the fit uses them (math 2.2): checked, averaged, per token.

// All per KV head. d is head_dim_k for q and k, head_dim_v for the rest.
struct LayerMoments {
  MatrixStack<double> query;          // [Hkv, d, d] C_Q, averaged over positions
  MatrixStack<double> key;            // [Hkv, d, d] C_K, averaged; about key_mean when centered
  MatrixStack<double> value;          // [Hkv, d, d] C_V; about value_mean when centered
  MatrixStack<double> value_target;   // [Hkv, d, d] C_S, or the energy moment per token
  MatrixStack<double> output_metric;  // [Hkv, d, d] M_O
  VectorStack<double> key_mean, value_mean;  // [Hkv, d], zeros when not centered
  MatrixStack<double> key_centers;           // [Hkv, 2, d] SideTransform::centers; may be absent
  int64_t count_q = 0, count_kv = 0;
  std::string warning;  // why rows count evenly although they should not; "" otherwise
};

// Uses options.objective_v, row_weights, center, key_centers and position_span only. With centers
// the key moment is about the nearer one of each segment, averaged over segments. Rows of a head
// that no query has read as INT2 count evenly, and so do all rows where their weighted sums were
// not collected, or where keys stay at positions as collected, at which they were not summed with
// weights. `model_rope`: a layer that is not turned by it has none. Throws Error, naming
// layer and moment: zero counts, a wrong shape, a sum that is not finite, a negative diagonal, no
// v_energy_moment for the energy objective.
LayerMoments layer_moments(const LayerStatistics& statistics, const FitOptions& options,
                           const Rope& model_rope);

// Whether rows of the layer count by attention in a fit with these options, of one head at least.
bool weighs_by_attention(const LayerStatistics& statistics, const FitOptions& options);

// How rows count in the quantized layers of a fit: row_weights_name, or kMixedRowWeights where
// layers differ. Without a quantized layer it is what `options` ask for.
inline constexpr const char* kMixedRowWeights = "mixed";
std::string used_row_weights(const std::vector<LayerStatistics>& statistics,
                             const FitOptions& options);

// Eigenvalues of a covariance from n rows of d are spread by a factor (1 +- sqrt(d / n))^2: 0.5 to
// 1.7 at this many rows a dimension. With fewer a fit comes with a warning, and the expansion
// behind c (1/n + 1/m) of convergence.h has no meaning.
inline constexpr int64_t kRowsPerDimension = 10;

// The mean of the stack's matrices, `count` times: what granularity `shared` fits.
MatrixStack<double> shared_over_heads(const MatrixStack<double>& stack);

// A covariance that can be decomposed into meaningful directions, and what was done to it.
struct RegularisedMoment {
  MatrixD moment;
  int rank = 0;             // numerical rank of what came in
  double shrinkage = 0;     // alpha; 0 when the input had full rank and enough rows
  std::string description;  // "rank 3 of 128 from 40 rows, ...", "" when nothing was done
};

// With rank < d, or fewer rows than d, eigenvectors of small eigenvalues are rounding noise. Then
// C becomes (1 - alpha) C + alpha diag(C), alpha = d / (d + rows) (math 2.4): channels keep their
// energies (the trace stays) and directions that no data supports become channels. The weight
// vanishes as rows are added. `eigenvalues` [d]: those of the moment, ascending.
RegularisedMoment regularised(const MatrixD& moment, const VectorD& eigenvalues, int64_t rows,
                              const std::string& where);

// Moments of rotated vectors averaged over the positions that will be served (math 8).
//
// Queries and keys are collected after RoPE, at the positions of the calibration sequences. With
// D(p) the rotation by p further positions, a moment M becomes D(p)^T M D(p) and a sum s becomes s
// D(p). Their means over p need only the mean phases of sums and differences of RoPE's frequencies.

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
