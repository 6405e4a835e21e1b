// The transform of one KV head: metric, decompositions, the balanced and the published fit (math
// 5 to 7).
#pragma once

#include <future>
#include <list>
#include <mutex>
#include <string>
#include <vector>

#include "oscar/fit/fit.h"
#include "oscar/fit/linalg.h"
#include "oscar/fit/moments.h"

namespace oscar {

// What an error of a transformed row costs (math 1.3): M_K, M_V and their feedback factors.

// Share of the mean diagonal that is added before the metric is factored.
inline constexpr double kMetricDamping = 0.01;

// [d, d] M with e M e^T the cost of an error e = x^ - x of a transformed row, mean diagonal 1:
// keys M = q_rotation^T C_Q q_rotation, values M = o_rotation M_O o_rotation^T, with `partner` the
// stored q_rotation or o_rotation and `weight` the head's own C_Q or M_O. The identity when the
// weight is zero: no error costs anything then, and plain rounding is as good as any. Both products
// from left to right, then the mean of the matrix and its transpose, then the division by the mean
// diagonal, all in one order of operations (linalg.h), like the factor below.
MatrixD error_metric(const MatrixF& partner, const MatrixD& weight, Side side);

// [d, d] unit upper triangular U of M + kMetricDamping mean(diag M) I = U D U^T (math 5.1): while
// columns are coded in ascending order, target_i = x_i - sum over j < i of e_j U(j, i). `metric` is
// M as stored, in f32.
MatrixD feedback_factor(const MatrixD& metric, const std::string& where);

// How a head with this factor rounds. A factor that is absent or the identity pushes no error into
// later columns: plain.
Rounding rounding_of(const MatrixStack<float>& feedback, int head);

// Fills (or clears) `metric` and `feedback` of a side from `weight` [Hkv, d, d], and sets the
// rounding of its recipe to what the factors do.
void set_metric(SideTransform& transform, Side side, const MatrixStack<double>& weight,
                bool with_metric, bool with_feedback, const std::string& where);

// Eigen-decompositions that several fits of one layer need, each computed once.

// Fits of a layer look at the same few moments. May be used from several threads at a time; what
// it returns lives as long as it does.
class Decompositions {
 public:
  // `eigh` of `moment`; of equal matrices only the first is decomposed. Throws as `eigh` does.
  const Eigh& of(const MatrixD& moment, const std::string& where);

 private:
  struct Entry {
    MatrixD moment;
    std::shared_future<Eigh> result;
  };
  std::mutex mutex_;
  std::list<Entry> entries_;
};

// A few plain numbers that say how concentrated a moment is (math 2.5); for inspection and reports.

// Of eigenvalues l_i (negative ones count as zero) with shares p_i = l_i / sum l.
struct SpectrumSummary {
  double trace = 0;                   // sum of l
  double largest = 0;                 // max l
  double top_share = 0;               // max p
  double effective_rank = 0;          // exp(-sum p ln p), 1 .. d (Roy and Vetterli 2007)
  double participation_ratio = 0;     // (sum l)^2 / sum l^2, 1 .. d
  int rank = 0;                       // eigenvalues above d * epsilon * the largest
  int dimension = 0;                  // d
  int dimensions_for_99_percent = 0;  // fewest directions that hold 99% of the trace
};

// `eigenvalues` [d] in ascending order. A spectrum without positive values gives zeros.
SpectrumSummary summarise_spectrum(const VectorD& eigenvalues);

// One line: "effective rank 37.2 of 128, participation 18.4, top share 12.1%, 99% in 88".
std::string describe(const SpectrumSummary& summary);

// OSCAR's rotation R = U H P (math 3.4), arXiv 2605.17757, of keys and of values alike.

struct OscarRotation {
  MatrixD rotation;     // [d, d] orthogonal, x' = x rotation
  VectorD eigenvalues;  // [d] of the moment, ascending: the order of U's columns
};

// U: eigenvectors of a moment [d, d] in ascending order, as `decomposed`; H: `hadamard(d)`; P: the
// bit-reversal shuffle of columns. The moment is C_Q for keys and C_S (or the energy moment) for
// values.
OscarRotation oscar_rotation(const Eigh& decomposed);

// The balanced transforms: not orthogonal, fitted to what varies and to what attention weighs.
//
// A row x' = (x - mean) T is rounded on one scale, so its channels err alike, in proportion to the
// row: E[e_i^2] ~ mean diag(T^T C T). What an error costs is e M e^T with M = T^-1 W T^-T, W = C_Q
// for keys and M_O for values. With C^(1/2) W C^(1/2) = V D V^T, every T is
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
// is best (embedded model, 16 held-out sequences of 4,096, offset 65,536: KL of INT2 keys alone
// .79, of values alone .56 of that with a = 1/4 and H, standard errors .02 and .03).

struct BalancedTransform {
  MatrixD forward;  // [d, d] T, x' = (x - mean) T; entries are bf16 numbers
  // [d, d] T^-1 of that rounded T, to the same bits on any machine (linalg.h); absent where
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
// first whose matrices serve in bf16 is taken (deviation_problem in fit.h).
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

// A side's transform put together from the heads of several fits.

// One head of a fit, and how its rows are to be written.
struct FittedHead {
  const SideTransform* fit = nullptr;  // with metric and feedback of every head
  int head = 0;                        // of that fit
  RowRecipe recipe = {};
};

// Heads in the given order, as many as are given: also more than a layer has, to run several ways
// of writing a side next to each other. Partners, metrics and feedback factors are stored when a
// head needs them; a head of plain rounding then has the identity for its factor.
SideTransform compose_heads(const std::vector<FittedHead>& heads, Side side);

// The table of key centers that writers and readers use, from what a bundle holds of them.

// [segments, Hkv, 2, d] KeyCenters::rows in float32, rounded to bf16 (math 4.9): center j of
// segment s is (c_j R - mean) forward, R the rotation to the segment's middle. Zeros for heads
// without centers. There are segments for all rope.max_positions.
std::vector<float> center_rows(const SideTransform& keys, const Rope& rope);

// What writing rows with a transform will cost, predicted from moments (math 10.1): to compare
// transforms of one head before anything is quantized.
//
// A row x' = (x - mean) T of d channels is rounded on one scale, so all its channels err about
// alike and in proportion to the row: E[e_i^2] ~ mean diag(T^T C T), C being the second moment of x
// about `mean`. An error costs e M e^T with M = P^T W P for keys (P = q_rotation,
// W = C_Q) and P W P^T for values (P = o_rotation, W = M_O); errors of different channels taken as
// unrelated leave mean diag(M). Up to a factor that depends on the rounding alone,
//
//     loss = mean diag(T^T C T) * mean diag(M).
//
// The balanced transform of plain rounding is the T that minimises this product
// (math 6.2), at (tr (C^1/2 W C^1/2)^1/2 / d)^2, so around it the loss of a wrong T grows with the
// square of what is wrong.
//
// Limits. Only ratios between transforms of one head and side mean anything. Clipping, rows that
// are not normal, shaped rounding (whose loss has det(M)^(1/d) for mean diag(M)) and the exact
// windows are left out. All rotations with one center score alike, because they keep both traces:
// this cannot rank them, or tell how well their columns spread outliers.

// The fit by which texts are judged: of every head the balanced transform for plain rounding, which
// follows the statistics most closely and minimises this loss. Row weights, centering and positions
// are those of `run`.
FitOptions judging_fit(const FitOptions& run);

// Moments to score transforms with: layer_moments, always centered. Errors as there.
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

// The transform of one head, with the fallbacks of heads that can't have the asked kind (math 6.4).

// What one side of a layer is fitted from; stacks over heads.
struct SideMoments {
  Side side;
  std::string name;                       // "layer 3, keys"
  const MatrixStack<double>& covariance;  // C_K or C_V
  const MatrixStack<double>& target;      // of OSCAR's rotation: C_Q, C_S or the energy moment
  const MatrixStack<double>& weight;      // of the balanced transform: C_Q or M_O
  int64_t covariance_rows, target_rows;
  bool weight_is_sampled;  // C_Q is, M_O is not
};

// What is asked of every head of a side.
struct HeadRequest {
  TransformKind kind;
  bool own_basis;  // of kOscar: eigenvectors of the covariance, not of the target
  bool shaped;     // of kBalanced: for shaped rounding
};

struct HeadTransform {
  TransformKind kind = TransformKind::kIdentity;
  MatrixD forward, inverse;  // [d, d]
  VectorD eigenvalues;       // [d]
  double condition_number = 1;
  std::string fallback;  // why `kind` is not the asked one
};

// `where` names the head in `warnings` and errors.
HeadTransform fit_head(const SideMoments& moments, int head, const HeadRequest& request,
                       const std::string& where, Decompositions& decompositions,
                       std::vector<std::string>& warnings);

}  // namespace oscar
