// The transform of one KV head: metric, decompositions, the balanced and the published fit (math
// 5 to 7).
#include "oscar/fit/head_fit.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <exception>

#include "oscar/base/process.h"
#include "oscar/cache/codec.h"
#include "oscar/cache/numeric.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/linalg.h"
#include "oscar/fit/moments.h"

namespace oscar {

// Metrics of the stored matrices, in float64, and their triangular factors, to the same bits on any
// machine: readers derive them.

MatrixD error_metric(const MatrixF& partner, const MatrixD& weight, Side side) {
  const MatrixD p = partner.cast<double>();
  const MatrixD turned = p.transpose();
  const MatrixD product = side == Side::kKey
                              ? fixed_order_product(fixed_order_product(turned, weight), p)
                              : fixed_order_product(fixed_order_product(p, weight), turned);
  const MatrixD symmetric = 0.5 * (product + product.transpose());
  const double mean_diagonal = fixed_order_mean_diagonal(symmetric);
  if (!(mean_diagonal > 0) || !std::isfinite(mean_diagonal)) {
    return MatrixD::Identity(weight.rows(), weight.cols());
  }
  return symmetric / mean_diagonal;
}

MatrixD feedback_factor(const MatrixD& metric, const std::string& where) {
  MatrixD damped = metric;
  damped.diagonal().array() += kMetricDamping * fixed_order_mean_diagonal(metric);
  return udu_factor(damped, where);
}

Rounding rounding_of(const MatrixStack<float>& feedback, int head) {
  return feedback.empty() || feedback[head].isIdentity(0) ? Rounding::kPlain : Rounding::kShaped;
}

void set_metric(SideTransform& transform, Side side, const MatrixStack<double>& weight,
                bool with_metric, bool with_feedback, const std::string& where) {
  const int heads = transform.forward.count, d = transform.forward.rows;
  transform.metric = with_metric ? MatrixStack<float>(heads, d, d) : MatrixStack<float>();
  transform.feedback = with_feedback ? MatrixStack<float>(heads, d, d) : MatrixStack<float>();
  parallel_for(with_metric || with_feedback ? heads : 0, [&](int64_t index) {
    const int head = static_cast<int>(index);
    const MatrixF metric =
        error_metric(partner_matrix(transform, side, head), weight[head], side).cast<float>();
    if (with_metric) transform.metric[head] = metric;
    if (with_feedback) {
      const std::string place = fmt::format("{}, head {}", where, head);
      transform.feedback[head] = feedback_factor(metric.cast<double>(), place).cast<float>();
    }
  });
  for (int head = 0; head < heads; ++head) {
    transform.recipe.rounding[static_cast<size_t>(head)] = rounding_of(transform.feedback, head);
  }
}

// A list: a layer has a few dozen different moments at most.

const Eigh& Decompositions::of(const MatrixD& moment, const std::string& where) {
  std::promise<Eigh> promise;
  const std::shared_future<Eigh>* found = nullptr;
  bool mine = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Entry& entry : entries_) {
      if (entry.moment.rows() == moment.rows() && entry.moment == moment) found = &entry.result;
    }
    if (found == nullptr) {
      found = &entries_.emplace_back(Entry{moment, promise.get_future().share()}).result;
      mine = true;
    }
  }
  if (mine) {
    try {
      promise.set_value(eigh(moment, where));
    } catch (...) {
      promise.set_exception(std::current_exception());
    }
  }
  return found->get();
}

// Entropy, participation and shares of an eigenvalue spectrum.

SpectrumSummary summarise_spectrum(const VectorD& eigenvalues) {
  SpectrumSummary s;
  s.dimension = static_cast<int>(eigenvalues.size());
  const VectorD positive = eigenvalues.cwiseMax(0.0);
  s.trace = positive.sum();
  if (!(s.trace > 0)) return s;
  s.rank = numerical_rank(eigenvalues);
  s.largest = positive.maxCoeff();
  s.top_share = s.largest / s.trace;
  const VectorD shares = positive / s.trace;
  double entropy = 0;
  for (const double p : shares) entropy -= p > 0 ? p * std::log(p) : 0.0;
  s.effective_rank = std::exp(entropy);
  s.participation_ratio = 1 / shares.squaredNorm();
  double held = 0;
  for (int i = s.dimension - 1; i >= 0 && held < 0.99; --i) {
    held += shares[i];
    ++s.dimensions_for_99_percent;
  }
  return s;
}

std::string describe(const SpectrumSummary& s) {
  if (!(s.trace > 0)) return fmt::format("no energy in {} dimensions", s.dimension);
  return fmt::format(
      "effective rank {:.1f} of {}, participation {:.1f}, top share {:.1f}%, 99% in {}",
      s.effective_rank, s.dimension, s.participation_ratio, 100 * s.top_share,
      s.dimensions_for_99_percent);
}

// Composition of OSCAR's rotation: eigenvectors, Hadamard, shuffle of columns.

OscarRotation oscar_rotation(const Eigh& decomposed) {
  const int d = static_cast<int>(decomposed.values.size());
  const MatrixD mixed = decomposed.vectors * hadamard(d);
  const std::vector<int> perm = bit_reversal_permutation(d);
  OscarRotation result{MatrixD(d, d), decomposed.values};
  for (int c = 0; c < d; ++c) result.rotation.col(c) = mixed.col(perm[c]);
  return result;
}

// Composition of the balanced transforms from raised eigenvalues, and the inverse as served.

namespace {

double nearest_bf16(double value) {
  return bf16_to_float(float_to_bf16(static_cast<float>(value)));
}

BalancedTransform compose(const BalancedBasis& basis, double exponent, const MatrixD& mixing,
                          const std::string& where) {
  const VectorD scales = basis.product.values.array().pow(exponent).matrix();
  BalancedTransform result;
  result.eigenvalues = basis.product.values;
  result.forward = basis.inverse_root * basis.product.vectors * scales.asDiagonal() * mixing;
  const double mean_square =
      (basis.covariance * result.forward).cwiseProduct(result.forward).sum() /
      static_cast<double>(basis.covariance.rows());
  result.forward = (result.forward / std::sqrt(mean_square)).unaryExpr(&nearest_bf16);
  result.condition_number = condition_number(result.forward, where + ", transform");
  if (result.condition_number <= kLargestCondition) {
    result.inverse = fixed_order_inverse(result.forward, where + ", transform");
  }
  return result;
}

}  // namespace

BalancedBasis balanced_basis(const MatrixD& covariance, const Eigh& decomposed,
                             const MatrixD& weight, const std::string& where) {
  const VectorD variances = raised_eigenvalues(decomposed.values, kBalancedFloor);
  const MatrixD root = symmetric_power(decomposed.vectors, variances, 0.5);
  BalancedBasis basis{.covariance = covariance,
                      .inverse_root = symmetric_power(decomposed.vectors, variances, -0.5),
                      .product = eigh(root * weight * root, where + ", balanced product")};
  basis.product.values = raised_eigenvalues(basis.product.values, kBalancedFloor);
  return basis;
}

BalancedTransform plain_balanced_transform(const BalancedBasis& basis, const std::string& where) {
  const int d = static_cast<int>(basis.covariance.rows());
  return compose(basis, kPlainExponent, hadamard(d), where);
}

BalancedTransform shaped_balanced_transform(const BalancedBasis& basis, double exponent,
                                            const std::string& where) {
  const VectorD costs = basis.product.values.array().pow(1 - 2 * exponent).matrix();
  return compose(basis, exponent, even_cost_mixing(costs), where);
}

// Copies of heads, with the parts that no head needs left out.

SideTransform compose_heads(const std::vector<FittedHead>& heads, Side side) {
  const int count = static_cast<int>(heads.size());
  const int d = heads.front().fit->forward.rows;
  const auto any = [&](auto&& wants) { return std::any_of(heads.begin(), heads.end(), wants); };
  SideTransform out;
  out.forward = MatrixStack<float>(count, d, d);
  out.mean = VectorStack<float>(count, d);
  out.eigenvalues = VectorStack<double>(count, d);
  if (any([](const FittedHead& h) { return h.fit->kind[h.head] == TransformKind::kBalanced; })) {
    out.partner = MatrixStack<float>(count, d, d);
  }
  if (any([](const FittedHead& h) {
        return h.recipe.scale_correction == ScaleCorrection::kMetric;
      })) {
    out.metric = MatrixStack<float>(count, d, d);
  }
  if (any([](const FittedHead& h) { return h.recipe.rounding == Rounding::kShaped; })) {
    out.feedback = MatrixStack<float>(count, d, d);
  }
  if (any([](const FittedHead& h) { return has_centers(*h.fit, h.head); })) {
    out.centers = MatrixStack<float>(count, kCenters, d);
  }
  for (int i = 0; i < count; ++i) {
    const FittedHead& source = heads[i];
    const SideTransform& fit = *source.fit;
    const int head = source.head;
    out.kind.push_back(fit.kind[head]);
    out.fallback.push_back(fit.fallback[head]);
    out.condition_number.push_back(fit.condition_number[head]);
    out.recipe.push_back(source.recipe);
    out.forward[i] = fit.forward[head];
    out.mean[i] = fit.mean[head];
    out.eigenvalues[i] = fit.eigenvalues[head];
    if (has_centers(fit, head)) out.centers[i] = fit.centers[head];
    if (!out.partner.empty()) {
      // Of a fit whose heads are all orthogonal, too: its partners are implied.
      out.partner[i] = partner_matrix(fit, side, head);
    }
    if (!out.metric.empty()) {
      if (source.recipe.scale_correction == ScaleCorrection::kMetric) {
        out.metric[i] = fit.metric[head];
      } else {
        // A codec that knows each head's correction does not read it: this keeps the file valid.
        out.metric[i].setIdentity();
      }
    }
    if (!out.feedback.empty()) {
      if (source.recipe.rounding == Rounding::kShaped) {
        out.feedback[i] = fit.feedback[head];
      } else {
        out.feedback[i].setIdentity();  // pushes nothing
      }
    }
  }
  return out;
}

// Centers turned to each segment, transformed and rounded.

std::vector<float> center_rows(const SideTransform& keys, const Rope& rope) {
  const int heads = keys.forward.count, d = keys.forward.rows;
  const int segments = std::max(1, (rope.max_positions + kSegmentTokens - 1) / kSegmentTokens);
  std::vector<float> rows(static_cast<size_t>(segments) * heads * kCenters * d, 0.0f);
  for (int head = 0; head < heads; ++head) {
    if (!has_centers(keys, head)) continue;
    MatrixD turned(segments * kCenters, d);
    for (int j = 0; j < kCenters; ++j) {
      const VectorD center = keys.centers[head].row(j).cast<double>();
      for (int s = 0; s < segments; ++s) {
        turned.row(s * kCenters + j) = average_sum(center, rope, phase_at(segment_middle(s)));
      }
    }
    turned.rowwise() -= keys.mean[head].cast<double>();
    const MatrixD transformed = turned * keys.forward[head].cast<double>();
    for (int s = 0; s < segments; ++s) {
      float* const to = rows.data() + (static_cast<size_t>(s) * heads + head) * kCenters * d;
      std::transform(
          transformed.row(s * kCenters).data(), transformed.row(s * kCenters).data() + kCenters * d,
          to, [](double entry) { return bf16_to_float(float_to_bf16(static_cast<float>(entry))); });
    }
  }
  return rows;
}

// Two traces of each head.

namespace {

// tr(A^T S A), S symmetric.
double trace_of(const MatrixD& a, const MatrixD& s) { return (s * a).cwiseProduct(a).sum(); }

}  // namespace

FitOptions judging_fit(const FitOptions& run) {
  FitOptions options;
  options.kind = TransformKind::kBalanced;
  options.row_weights = run.row_weights;
  options.center = run.center;
  options.position_span = run.position_span;
  return options;
}

LayerMoments scoring_moments(const LayerStatistics& statistics, FitOptions options,
                             const Rope& rope) {
  options.center = true;
  return layer_moments(statistics, options, rope);
}

std::vector<double> predicted_losses(const SideTransform& transform, Side side,
                                     const LayerMoments& moments) {
  const bool key = side == Side::kKey;
  const MatrixStack<double>& covariance = key ? moments.key : moments.value;
  const MatrixStack<double>& weight = key ? moments.query : moments.output_metric;
  const VectorStack<double>& mean = key ? moments.key_mean : moments.value_mean;
  assert(transform.forward.count == covariance.count && transform.forward.rows == covariance.rows);
  const double d = covariance.rows;
  std::vector<double> losses(static_cast<size_t>(covariance.count));
  parallel_for(covariance.count, [&](int64_t index) {
    const int head = static_cast<int>(index);
    const MatrixD forward = transform.forward[head].cast<double>();
    const MatrixD partner = partner_matrix(transform, side, head).cast<double>();
    const VectorD shift = mean[head] - transform.mean[head].cast<double>();
    const double energy = trace_of(forward, covariance[head]) + (shift * forward).squaredNorm();
    const double cost = trace_of(key ? partner : MatrixD(partner.transpose()), weight[head]);
    losses[static_cast<size_t>(index)] = energy / d * cost / d;
  });
  return losses;
}

std::vector<double> loss_ratios(const SideTransform& transform, Side side,
                                const LayerMoments& moments, const std::vector<double>& own) {
  std::vector<double> ratios = predicted_losses(transform, side, moments);
  for (size_t head = 0; head < ratios.size(); ++head) {
    ratios[head] = own[head] > 0 ? ratios[head] / own[head] : 1.0;
  }
  return ratios;
}

// Balanced, then OSCAR's rotation, then Hadamard: the first that the head's moments can carry.

namespace {

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

// The moment, regularised where it has to be, with a note of that.
MatrixD regularised_and_noted(const MatrixD& moment, int64_t rows, const std::string& where,
                              Decompositions& decompositions, std::vector<std::string>& warnings) {
  RegularisedMoment result =
      regularised(moment, decompositions.of(moment, where).values, rows, where);
  if (!result.description.empty()) warnings.push_back(result.description);
  return std::move(result.moment);
}

HeadTransform oscar_head(const SideMoments& m, int head, bool own_basis, const std::string& where,
                         Decompositions& decompositions, std::vector<std::string>& warnings) {
  const bool key = m.side == Side::kKey;
  const MatrixD basis_of = own_basis ? m.covariance[head] : m.target[head];
  if (!(basis_of.trace() > 0)) {
    const char* what = own_basis ? "the covariance" : key ? "C_Q" : "the value target";
    HeadTransform h = plain_head(TransformKind::kHadamard, m.target.rows);
    h.fallback = fmt::format("{} is zero: Hadamard instead of OSCAR's rotation", what);
    return h;
  }
  const char* name = own_basis ? (key ? ", C_K" : ", C_V") : key ? ", C_Q" : ", value target";
  const MatrixD usable =
      regularised_and_noted(basis_of, own_basis ? m.covariance_rows : m.target_rows, where + name,
                            decompositions, warnings);
  const OscarRotation fitted = oscar_rotation(decompositions.of(usable, where + name));
  return orthogonal_head(TransformKind::kOscar, fitted.rotation, fitted.eigenvalues);
}

// Why `fitted` can't be served; "" when it can.
std::string problem_of(const BalancedTransform& fitted, Side side) {
  if (!(fitted.condition_number <= kLargestCondition)) {
    return fmt::format("cond_2(T) = {:.3g} is over {:g}", fitted.condition_number,
                       kLargestCondition);
  }
  const MatrixF forward = fitted.forward.cast<float>();
  const MatrixF partner =
      (side == Side::kKey ? MatrixD(fitted.inverse.transpose()) : fitted.inverse).cast<float>();
  return deviation_problem(transform_deviation(forward, partner, side, TransformKind::kBalanced),
                           TransformKind::kBalanced);
}

// "" and a transform, or the reason why this head can't have one.
std::string try_balanced_head(const SideMoments& m, int head, bool shaped, const std::string& where,
                              Decompositions& decompositions, std::vector<std::string>& warnings,
                              HeadTransform& result) {
  const bool key = m.side == Side::kKey;
  if (!(m.covariance[head].trace() > 0)) {
    return key ? "keys do not vary" : "values do not vary";
  }
  if (!(m.weight[head].trace() > 0)) return key ? "C_Q is zero" : "M_O is zero";
  const std::string covariance_name = where + (key ? ", C_K" : ", C_V");
  const MatrixD covariance = regularised_and_noted(m.covariance[head], m.covariance_rows,
                                                   covariance_name, decompositions, warnings);
  MatrixD weight = m.weight[head];
  if (m.weight_is_sampled) {
    weight =
        regularised_and_noted(weight, m.target_rows, where + ", C_Q", decompositions, warnings);
  }
  const BalancedBasis basis =
      balanced_basis(covariance, decompositions.of(covariance, covariance_name), weight, where);
  std::vector<BalancedTransform> tried;
  std::string problem;
  if (shaped) {
    for (const double exponent : kShapedExponents) {
      tried.push_back(shaped_balanced_transform(basis, exponent, where));
      problem = problem_of(tried.back(), m.side);
      if (problem.empty()) break;
    }
  } else {
    tried.push_back(plain_balanced_transform(basis, where));
    problem = problem_of(tried.back(), m.side);
  }
  if (!problem.empty()) return problem;
  BalancedTransform& fitted = tried.back();
  result = {.kind = TransformKind::kBalanced,
            .forward = std::move(fitted.forward),
            .inverse = std::move(fitted.inverse),
            .eigenvalues = std::move(fitted.eigenvalues),
            .condition_number = fitted.condition_number,
            .fallback = {}};
  return "";
}

}  // namespace

HeadTransform fit_head(const SideMoments& moments, int head, const HeadRequest& request,
                       const std::string& where, Decompositions& decompositions,
                       std::vector<std::string>& warnings) {
  if (request.kind == TransformKind::kIdentity || request.kind == TransformKind::kHadamard) {
    return plain_head(request.kind, moments.target.rows);
  }
  std::string reason;
  if (request.kind == TransformKind::kBalanced) {
    HeadTransform balanced;
    const std::string problem =
        try_balanced_head(moments, head, request.shaped, where, decompositions, warnings, balanced);
    if (problem.empty()) return balanced;
    reason = problem + ": OSCAR's rotation instead of the balanced transform";
  }
  HeadTransform h = oscar_head(moments, head, request.own_basis, where, decompositions, warnings);
  h.fallback = join_reasons(reason, h.fallback);
  return h;
}

}  // namespace oscar
