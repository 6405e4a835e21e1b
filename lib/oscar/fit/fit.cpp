// One layer, keys and values, head by head, with the fallbacks of heads that can't be fitted.
#include "oscar/fit/fit.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "oscar/fit/balanced_fit.h"
#include "oscar/fit/checks.h"
#include "oscar/fit/metric.h"
#include "oscar/fit/moments.h"
#include "oscar/fit/oscar_fit.h"
#include "oscar/linalg/hadamard.h"

namespace oscar {
namespace {

// Fewer rows than this many per dimension deserve a warning.
constexpr int64_t kRowsPerDimension = 10;

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

struct HeadTransform {
  TransformKind kind = TransformKind::kIdentity;
  MatrixD forward, inverse;
  VectorD eigenvalues;
  double condition_number = 1;
  std::string fallback;
};

HeadTransform orthogonal_head(TransformKind kind, const MatrixD& rotation,
                              const VectorD& eigenvalues) {
  return {.kind = kind,
          .forward = rotation,
          .inverse = rotation.transpose(),
          .eigenvalues = eigenvalues,
          .condition_number = 1,
          .fallback = {}};
}

HeadTransform plain_head(TransformKind kind, int d) {
  const MatrixD rotation =
      kind == TransformKind::kIdentity ? MatrixD(MatrixD::Identity(d, d)) : hadamard(d);
  return orthogonal_head(kind, rotation, VectorD::Ones(d));
}

std::string join_reasons(const std::string& first, const std::string& second) {
  return first.empty() || second.empty() ? first + second : first + "; " + second;
}

// Keeps the note of a regularisation and hands its matrix on.
MatrixD regularised_and_noted(const MatrixD& moment, int64_t rows, const std::string& where,
                              std::vector<std::string>& warnings) {
  const RegularisedMoment result = regularised(moment, rows, where);
  if (!result.description.empty()) warnings.push_back(result.description);
  return result.moment;
}

HeadTransform oscar_head(const SideMoments& m, int head, const std::string& where,
                         std::vector<std::string>& warnings) {
  const MatrixD target = m.target[head];
  if (!(target.trace() > 0)) {
    HeadTransform h = plain_head(TransformKind::kHadamard, m.target.rows);
    h.fallback = fmt::format("{} is zero: Hadamard instead of OSCAR's rotation",
                             m.side == Side::kKey ? "C_Q" : "the value target");
    return h;
  }
  const MatrixD usable = regularised_and_noted(
      target, m.target_rows, where + (m.side == Side::kKey ? ", C_Q" : ", value target"), warnings);
  const OscarRotation fitted = oscar_rotation(usable, where);
  return orthogonal_head(TransformKind::kOscar, fitted.rotation, fitted.eigenvalues);
}

// "" and a transform, or the reason why this head can't have one.
std::string try_balanced_head(const SideMoments& m, int head, const std::string& where,
                              std::vector<std::string>& warnings, HeadTransform& result) {
  const bool key = m.side == Side::kKey;
  if (!(m.covariance[head].trace() > 0)) {
    return key ? "keys do not vary" : "values do not vary";
  }
  if (!(m.weight[head].trace() > 0)) return key ? "C_Q is zero" : "M_O is zero";
  const MatrixD covariance = regularised_and_noted(m.covariance[head], m.covariance_rows,
                                                   where + (key ? ", C_K" : ", C_V"), warnings);
  const MatrixD weight = m.weight_is_sampled ? regularised_and_noted(m.weight[head], m.target_rows,
                                                                     where + ", C_Q", warnings)
                                             : MatrixD(m.weight[head]);
  const BalancedTransform fitted = balanced_transform(covariance, weight, where);
  if (!(fitted.condition_number <= kLargestCondition)) {
    return fmt::format("cond_2(T) = {:.3g} is over {:g}", fitted.condition_number,
                       kLargestCondition);
  }
  const MatrixF forward = fitted.forward.cast<float>();
  const MatrixF partner =
      (key ? MatrixD(fitted.inverse.transpose()) : fitted.inverse).cast<float>();
  std::string problem =
      deviation_problem(transform_deviation(forward, partner, m.side, TransformKind::kBalanced),
                        TransformKind::kBalanced);
  if (!problem.empty()) return problem;
  result = {.kind = TransformKind::kBalanced,
            .forward = fitted.forward,
            .inverse = fitted.inverse,
            .eigenvalues = fitted.eigenvalues,
            .condition_number = fitted.condition_number,
            .fallback = {}};
  return "";
}

HeadTransform fit_head(const SideMoments& m, int head, TransformKind kind, const std::string& where,
                       std::vector<std::string>& warnings) {
  if (kind == TransformKind::kIdentity || kind == TransformKind::kHadamard) {
    return plain_head(kind, m.target.rows);
  }
  std::string reason;
  if (kind == TransformKind::kBalanced) {
    HeadTransform balanced;
    const std::string problem = try_balanced_head(m, head, where, warnings, balanced);
    if (problem.empty()) return balanced;
    reason = problem + ": OSCAR's rotation instead of the balanced transform";
  }
  HeadTransform h = oscar_head(m, head, where, warnings);
  h.fallback = join_reasons(reason, h.fallback);
  return h;
}

// Writes the heads out as stored: f32, partners only when some head is not orthogonal.
void store_heads(const std::vector<HeadTransform>& heads, Side side, SideTransform& out) {
  const int count = static_cast<int>(heads.size());
  const int d = static_cast<int>(heads.front().forward.rows());
  bool any_balanced = false;
  for (const HeadTransform& h : heads) any_balanced |= h.kind == TransformKind::kBalanced;
  out.forward = MatrixStack<float>(count, d, d);
  if (any_balanced) out.partner = MatrixStack<float>(count, d, d);
  out.eigenvalues = VectorStack<double>(count, d);
  for (int i = 0; i < count; ++i) {
    const HeadTransform& h = heads[i];
    out.kind.push_back(h.kind);
    out.fallback.push_back(h.fallback);
    out.condition_number.push_back(h.condition_number);
    out.eigenvalues[i] = h.eigenvalues;
    out.forward[i] = h.forward.cast<float>();
    if (any_balanced) {
      const MatrixD partner = side == Side::kKey ? MatrixD(h.inverse.transpose()) : h.inverse;
      out.partner[i] = partner.cast<float>();
    }
  }
}

SideTransform fit_side(const SideMoments& m, const VectorStack<double>& mean,
                       const FitOptions& options, double clip_ratio,
                       std::vector<std::string>& warnings) {
  const bool shared = options.granularity == Granularity::kShared;
  const int heads = m.target.count;
  std::vector<HeadTransform> fitted;
  for (int head = 0; head < heads; ++head) {
    if (shared && head > 0) {
      fitted.push_back(fitted.front());
      continue;
    }
    const std::string where =
        shared ? m.name + ", all heads" : fmt::format("{}, head {}", m.name, head);
    fitted.push_back(fit_head(m, head, options.kind, where, warnings));
  }
  SideTransform out;
  store_heads(fitted, m.side, out);
  out.mean = VectorStack<float>(heads, mean.cols);
  for (int head = 0; head < heads; ++head) out.mean[head] = mean[head].cast<float>();
  out.clip_ratio.assign(static_cast<size_t>(heads), static_cast<float>(clip_ratio));
  out.scale_correction.assign(static_cast<size_t>(heads), options.scale_correction);
  return out;
}

// A moment that two transforms looked at is reported once.
void drop_repeats(std::vector<std::string>& warnings) {
  std::vector<std::string> kept;
  for (const std::string& warning : warnings) {
    if (std::find(kept.begin(), kept.end(), warning) == kept.end()) kept.push_back(warning);
  }
  warnings = std::move(kept);
}

void warn_of_few_rows(const LayerGeometry& g, int64_t count_kv, TransformKind kind,
                      std::vector<std::string>& warnings) {
  const bool uses_statistics = kind == TransformKind::kOscar || kind == TransformKind::kBalanced;
  const int64_t wanted = kRowsPerDimension * std::max(g.head_dim_k, g.head_dim_v);
  if (!uses_statistics || count_kv >= wanted) return;
  warnings.push_back(
      fmt::format("layer {}: {} tokens are few for head dimension {}; calibrate on at least {}",
                  g.layer_id, count_kv, std::max(g.head_dim_k, g.head_dim_v), wanted));
}

}  // namespace

MatrixF partner_matrix(const SideTransform& transform, Side side, int head) {
  if (!transform.partner.empty()) return transform.partner[head];
  return side == Side::kKey ? MatrixF(transform.forward[head])
                            : MatrixF(transform.forward[head].transpose());
}

LayerTransforms fit_layer(const LayerStatistics& statistics, const FitOptions& options,
                          const Rope& rope) {
  const LayerMoments own = layer_moments(statistics, options, rope);
  const bool shared = options.granularity == Granularity::kShared;
  LayerMoments fitted = own;
  if (shared) {
    for (MatrixStack<double>* stack :
         {&fitted.query, &fitted.key, &fitted.value, &fitted.value_target, &fitted.output_metric}) {
      *stack = shared_over_heads(*stack);
    }
  }
  const int64_t pooled = shared ? statistics.geometry.num_kv_heads : 1;
  const int64_t rows_q = own.count_q * pooled, rows_kv = own.count_kv * pooled;
  const int64_t rows_target = options.objective_v == ValueObjective::kEnergy ? rows_kv : rows_q;

  LayerTransforms result;
  result.geometry = statistics.geometry;
  warn_of_few_rows(result.geometry, own.count_kv, options.kind, result.warnings);
  const std::string layer = fmt::format("layer {}", result.geometry.layer_id);
  const SideMoments key{Side::kKey,   layer + ", keys", fitted.key, fitted.query,
                        fitted.query, rows_kv,          rows_q,     true};
  const SideMoments value{
      Side::kValue, layer + ", values", fitted.value, fitted.value_target, fitted.output_metric,
      rows_kv,      rows_target,        false};
  result.key = fit_side(key, own.key_mean, options, options.clip_k, result.warnings);
  result.value = fit_side(value, own.value_mean, options, options.clip_v, result.warnings);

  drop_repeats(result.warnings);

  const bool with_metric = options.scale_correction == ScaleCorrection::kMetric;
  const bool with_feedback = options.rounding == Rounding::kShaped;
  set_metric(result.key, Side::kKey, own.query, with_metric, with_feedback, key.name);
  set_metric(result.value, Side::kValue, own.output_metric, with_metric, with_feedback, value.name);
  result.predicted_output_nmse.assign(static_cast<size_t>(result.geometry.num_kv_heads),
                                      std::numeric_limits<double>::quiet_NaN());
  return result;
}

}  // namespace oscar
