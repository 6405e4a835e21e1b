// Second moments and means as the fit uses them (math 2.2): checked, averaged, per token.
#pragma once

#include <string>
#include <vector>

#include "oscar/fit/fit.h"

namespace oscar {

// All per KV head. d is head_dim_k for q and k, head_dim_v for the rest.
struct LayerMoments {
  MatrixStack<double> query;          // [Hkv, d, d] C_Q, averaged over positions
  MatrixStack<double> key;            // [Hkv, d, d] C_K, averaged; about key_mean when centred
  MatrixStack<double> value;          // [Hkv, d, d] C_V; about value_mean when centred
  MatrixStack<double> value_target;   // [Hkv, d, d] C_S, or the energy moment per token
  MatrixStack<double> output_metric;  // [Hkv, d, d] M_O
  VectorStack<double> key_mean, value_mean;  // [Hkv, d], zeros when not centred
  MatrixStack<double> key_centres;           // [Hkv, 2, d] SideTransform::centres; may be absent
  int64_t count_q = 0, count_kv = 0;
  std::string warning;  // why rows count evenly although they should not; "" otherwise
};

// Uses options.objective_v, row_weights, center, key_centres and position_span only. With centres
// the key moment is about the nearer one of each segment, averaged over segments. Rows of a head
// that no query has read as INT2 count evenly, and so do all rows where their weighted sums were
// not collected, or where keys stay at positions as collected, at which they were not summed with
// weights. Throws Error, naming layer and moment: zero counts, a wrong shape, a sum that is not
// finite, a negative diagonal, no v_energy_moment for the energy objective.
LayerMoments layer_moments(const LayerStatistics& statistics, const FitOptions& options,
                           const Rope& rope);

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

}  // namespace oscar
