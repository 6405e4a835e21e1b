// Whether the text was enough.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/linalg.h"

namespace oscar {

// How far two subspaces lie apart.

// Fewest leading eigenvectors (the last columns) that hold `share` of the sum of the positive
// eigenvalues, ascending; 0 when none is positive.
int leading_dimensions(const VectorD& eigenvalues, double share);

// Principal angles between the column spaces of A [d, r] and B [d, s], both orthonormal, in radians
// and ascending; min(r, s) of them. Their cosines are the singular values of A^T B (Bjorck and
// Golub 1973), which come from LAPACK's eigenvalues of (A^T B)^T (A^T B): angles below 1e-8 are
// rounding. `where` names the matrices in errors.
VectorD principal_angles(const MatrixD& a, const MatrixD& b, const std::string& where);

// Would another text, or more of it, give another fit (math 10.2)? Judged from sums of its parts.
//
// Two figures for each layer and side. Principal angles between the leading eigenspaces of the
// first and of the second part: how far the directions have settled. And predicted loss
// (head_fit.h) of a balanced transform that was fitted to one part, on the other part,
// against the transform fitted to that other part itself: what not knowing the text costs. The
// balanced transform is used whatever the run fits, because it follows the text most closely; a
// rotation loses less.
//
// Near its minimum the loss grows with the square of an error, and errors of moments of n tokens
// have variance ~ 1/n. A fit to n tokens scored on m others, relative to their own fit, therefore
// loses about c (1/n + 1/m): the second term is what that own fit gains by having seen them. c is
// the least-squares value over all splits; the fit to all N tokens then loses c/N on text that it
// has not seen. This extrapolates from halves and holds for sequences in random order: a corpus
// whose second part is of another kind than its first looks as if it had not converged.

// A corpus is enough when the choice of its text costs at most this share of predicted loss. KL
// goes with the loss, and an evaluation on some 100,000 tokens gives KL with an interval of several
// per cent: less would not be seen.
inline constexpr double kEnoughCost = 0.02;
// Share of the energy that the leading eigenspaces hold.
inline constexpr double kLeadingShare = 0.9;

// One transform fitted to a part of the text and scored on a part that it has not seen.
struct ConvergenceSplit {
  int64_t fit_tokens = 0, scored_tokens = 0;
  bool operator==(const ConvergenceSplit&) const = default;
};

struct SideConvergence {
  double mean_angle = 0, largest_angle = 0;  // degrees, over principal angles and heads
  double mean_cost = 0, worst_cost = 0;      // c/N over heads, a share of predicted loss
  std::vector<double> excess;                // [splits], mean over heads, relative to the own fit
};

struct LayerConvergence {
  int layer_id = 0;
  std::vector<ConvergenceSplit> splits;
  SideConvergence key, value;
};

// Why parts of these token counts (ascending; the last one is everything) say nothing, or "": a
// part with fewer than ten tokens for each of `head_dim` dimensions has no covariance to speak of.
std::string convergence_problem(const std::vector<int64_t>& part_tokens, int head_dim);

// `parts`: earlier states of the layer's running sums, ascending; the last one is about half, an
// earlier one adds a split. Their o_proj_metric may be absent. Of `options` centering and positions
// count. Precondition: convergence_problem says "". Throws Error as fit_layer and
// remaining_statistics do.
LayerConvergence layer_convergence(const std::vector<const LayerStatistics*>& parts,
                                   const LayerStatistics& total, const FitOptions& options,
                                   const Rope& rope);

// The record that a bundle keeps (bundle/SCHEMA.md) of a run that collected `tokens`: figures over
// all layers, which text to use, and a table by layer. Without layers the record holds `problem`.
Json convergence_record(const std::vector<LayerConvergence>& layers, int64_t tokens,
                        const std::string& problem);

// The record in words, lines of at most 68 columns: two of verdict and figures, one of angles; a
// single one when nothing was judged, none when the record can't be read, because any program may
// have written it.
std::vector<std::string> convergence_lines(const Json& record);

// Said of a file without a record: merged sums, imports and runs in transformers have none.
inline constexpr const char* kNoVerdict = "the file keeps no verdict on it";

// convergence_lines, or why there are none.
std::vector<std::string> verdict_lines(const Json& record);

// Whether the record says that more text is needed.
bool needs_more_text(const Json& record);

}  // namespace oscar
