// Two traces of each head.
#include "oscar/fit/predicted_loss.h"

#include "oscar/base/parallel.h"

namespace oscar {
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

}  // namespace oscar
