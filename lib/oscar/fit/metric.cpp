// Metrics of the stored matrices, in float64, and their triangular factors, to the same bits on any
// machine: readers derive them.
#include "oscar/fit/metric.h"

#include <fmt/format.h>

#include <cmath>

#include "oscar/base/parallel.h"
#include "oscar/linalg/fixed_order.h"

namespace oscar {

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

}  // namespace oscar
