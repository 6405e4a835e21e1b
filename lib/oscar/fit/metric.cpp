// Metrics of the stored matrices, in float64, and their triangular factors.
#include "oscar/fit/metric.h"

#include <fmt/format.h>

#include <cmath>

#include "oscar/linalg/symmetric.h"

namespace oscar {

MatrixD error_metric(const MatrixF& partner, const MatrixD& weight, Side side) {
  const MatrixD p = partner.cast<double>();
  const MatrixD product = side == Side::kKey ? MatrixD(p.transpose() * weight * p)
                                             : MatrixD(p * weight * p.transpose());
  const MatrixD symmetric = 0.5 * (product + product.transpose());
  const double mean_diagonal = symmetric.diagonal().mean();
  if (!(mean_diagonal > 0) || !std::isfinite(mean_diagonal)) {
    return MatrixD::Identity(weight.rows(), weight.cols());
  }
  return symmetric / mean_diagonal;
}

MatrixD feedback_factor(const MatrixD& metric, const std::string& where) {
  MatrixD damped = metric;
  damped.diagonal().array() += kMetricDamping * metric.diagonal().mean();
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
  for (int head = 0; head < heads; ++head) {
    if (!with_metric && !with_feedback) break;
    const MatrixD metric = error_metric(partner_matrix(transform, side, head), weight[head], side);
    if (with_metric) transform.metric[head] = metric.cast<float>();
    if (with_feedback) {
      const std::string place = fmt::format("{}, head {}", where, head);
      transform.feedback[head] = feedback_factor(metric, place).cast<float>();
    }
  }
  for (int head = 0; head < heads; ++head) {
    transform.recipe.rounding[static_cast<size_t>(head)] = rounding_of(transform.feedback, head);
  }
}

}  // namespace oscar
