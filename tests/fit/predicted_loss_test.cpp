// The loss model against rows, its minimum, and what it cannot see.
#include "oscar/fit/predicted_loss.h"

#include <gtest/gtest.h>

#include "fit/synthetic.h"
#include "oscar/linalg/symmetric.h"

namespace oscar {
namespace {

constexpr int kLossDim = 32;

FitOptions options(TransformKind kind, bool center = true) {
  FitOptions fit;
  fit.kind = kind;
  fit.center = center;
  return fit;
}

TEST(PredictedLoss, IsMeanSquareOfTheRowsTimesMeanCostOfAUnitError) {
  const synthetic::Rows rows = synthetic::make_rows(2, kLossDim, 500, 2, 3);
  const LayerStatistics sums = synthetic::collect(rows, 4);
  const LayerStatistics other = synthetic::statistics(2, kLossDim, 500, 9);  // another mean, too
  const LayerTransforms fit = fit_layer(other, options(TransformKind::kBalanced), {});
  const LayerMoments moments = scoring_moments(sums, {}, {});
  for (const Side side : {Side::kKey, Side::kValue}) {
    const SideTransform& t = side == Side::kKey ? fit.key : fit.value;
    const auto losses = predicted_losses(t, side, moments);
    for (int h = 0; h < 2; ++h) {
      const MatrixD x = side == Side::kKey ? rows.k[h] : rows.v[h];
      const MatrixD written =
          (x.rowwise() - t.mean[h].cast<double>()) * t.forward[h].cast<double>();
      const MatrixD partner = partner_matrix(t, side, h).cast<double>();
      double cost = 0;  // of errors of one on one channel after another
      if (side == Side::kKey) {
        const MatrixD scores = rows.q[h] * partner;  // q e^T for every query
        cost = scores.squaredNorm() / static_cast<double>(scores.rows());
      } else {
        cost = (partner * sums.o_proj_metric[h] * partner.transpose()).trace();
      }
      const double expected =
          written.squaredNorm() / static_cast<double>(written.size()) * (cost / kLossDim);
      EXPECT_NEAR(losses[h] / expected, 1, 1e-9);
    }
  }
}

TEST(PredictedLoss, OfTheBalancedTransformIsTheSmallestThereCanBe) {
  const LayerStatistics sums = synthetic::statistics(2, kLossDim);
  const LayerMoments moments = scoring_moments(sums, {}, {});
  const auto balanced = predicted_losses(fit_layer(sums, options(TransformKind::kBalanced), {}).key,
                                         Side::kKey, moments);
  for (int h = 0; h < 2; ++h) {
    const Eigh c = eigh(moments.key[h], "C_K");
    const MatrixD root = symmetric_power(c.vectors, c.values, 0.5);
    const VectorD d = eigh(root * moments.query[h] * root, "K").values;
    const double least = std::pow(d.cwiseMax(0.0).cwiseSqrt().sum() / kLossDim, 2);
    EXPECT_GE(balanced[h], least * (1 - 1e-12));
    EXPECT_LE(balanced[h], least * 1.001);  // rounding of T to bf16
  }
  for (const auto kind : {TransformKind::kOscar, TransformKind::kHadamard}) {
    const auto other =
        predicted_losses(fit_layer(sums, options(kind), {}).key, Side::kKey, moments);
    // Every rotation loses mean diag(C_K) mean diag(C_Q): here 3.4 and 2.5 times the least.
    for (int h = 0; h < 2; ++h) EXPECT_GT(other[h], 2 * balanced[h]);
  }
}

TEST(PredictedLoss, CannotTellRotationsApart) {
  const LayerStatistics sums = synthetic::statistics(1, kLossDim);
  const LayerMoments moments = scoring_moments(sums, {}, {});
  const auto loss = [&](TransformKind kind) {
    return predicted_losses(fit_layer(sums, options(kind), {}).value, Side::kValue, moments)[0];
  };
  EXPECT_NEAR(loss(TransformKind::kOscar) / loss(TransformKind::kIdentity), 1, 1e-6);  // f32
}

TEST(PredictedLoss, OfRowsThatKeepTheirMeanCountsIt) {
  const LayerStatistics sums = synthetic::statistics(1, kLossDim);
  const LayerMoments moments = scoring_moments(sums, {}, {});
  const auto loss = [&](bool center) {
    const FitOptions fit = options(TransformKind::kIdentity, center);
    return predicted_losses(fit_layer(sums, fit, {}).key, Side::kKey, moments)[0];
  };
  const double energy = moments.key[0].trace();
  EXPECT_NEAR(loss(false) / loss(true), 1 + moments.key_mean[0].squaredNorm() / energy, 1e-6);
}

}  // namespace
}  // namespace oscar
