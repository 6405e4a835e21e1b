// The balanced transform, the metrics, the feedback factor and the load checks.
#include "oscar/fit/balanced_fit.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "fit/synthetic.h"
#include "oscar/base/error.h"
#include "oscar/fit/checks.h"
#include "oscar/fit/metric.h"
#include "oscar/fit/moments.h"

namespace oscar {
namespace {

using synthetic::from_identity;
using synthetic::largest;

FitOptions balanced_options() {
  FitOptions options;
  options.kind = TransformKind::kBalanced;
  options.center = true;
  options.rounding = Rounding::kShaped;
  options.scale_correction = ScaleCorrection::kMetric;
  return options;
}

TEST(BalancedTransform, TimesItsInverseIsTheIdentityAndRowsHaveUnitMeanSquare) {
  for (const int d : {8, 12, 64, 96, 128}) {
    const LayerStatistics s = synthetic::statistics(1, d, 2000);
    FitOptions options;
    options.center = true;
    const LayerMoments m = layer_moments(s, options, Rope{});
    const MatrixD c_k = m.key[0], c_q = m.query[0];
    const BalancedTransform t = balanced_transform(c_k, c_q, "test");
    EXPECT_LE(from_identity(t.forward * t.inverse), 1e-10) << d;
    // Each of the d^2 entries of T is off by at most 2^-8 of itself.
    EXPECT_NEAR((t.forward.transpose() * c_k * t.forward).trace() / d, 1.0, 0x1p-8) << d;
    EXPECT_GT(t.condition_number, 1);
    for (int i = 1; i < d; ++i) EXPECT_LE(t.eigenvalues[i - 1], t.eigenvalues[i]);
  }
}

TEST(BalancedTransform, GivesKeysAndQueriesTheSameCovarianceUpToTheScalar) {
  const int d = 32;
  FitOptions options;
  options.center = true;
  const LayerMoments m = layer_moments(synthetic::statistics(1, d), options, Rope{});
  const BalancedTransform t = balanced_transform(m.key[0], m.query[0], "test");
  // T^T C_K T = H^T D^(1/2) H / s^2 and T^-1 C_Q T^-T = H^T D^(1/2) H s^2.
  const MatrixD keys = t.forward.transpose() * m.key[0] * t.forward;
  const MatrixD queries = t.inverse * m.query[0] * t.inverse.transpose();
  const double ratio = queries.trace() / keys.trace();
  // T is rounded to bf16 and its inverse follows, so both move by at most 2^-8 of an entry,
  // amplified by the condition number in the inverse.
  EXPECT_LE(largest(queries - ratio * keys), 0x1p-6 * largest(queries));
  // Every column holds the same share, thanks to H.
  for (int i = 0; i < d; ++i) EXPECT_NEAR(keys(i, i), 1.0, 0x1p-6);
}

// The widest condition numbers of a trained model's heads lie between 25 and 100.
TEST(BalancedTransform, OfAStretchedHeadServesInBf16WithOneRoundingLeft) {
  const int d = 128;
  std::mt19937_64 generator(5);
  MatrixD stretch = MatrixD::Zero(d, d);
  for (int i = 0; i < d; ++i) stretch(i, i) = std::pow(10.0, 3.4 * i / (d - 1) - 1.7);
  const MatrixD mixing = synthetic::normal_rows(d, d, generator).householderQr().householderQ();
  const MatrixD covariance = mixing * stretch * mixing.transpose();
  const MatrixD weight = mixing * stretch.inverse() * mixing.transpose();
  const BalancedTransform t = balanced_transform(covariance, weight, "test");
  EXPECT_GT(t.condition_number, 25);
  const MatrixF forward = t.forward.cast<float>();
  EXPECT_EQ(MatrixD(forward.cast<double>()), t.forward);
  for (const float entry : forward.reshaped()) {
    ASSERT_EQ(std::bit_cast<uint32_t>(entry) & 0xffffu, 0u) << "not a bf16 number";
  }
  const MatrixF partner = t.inverse.cast<float>();
  const TransformDeviation served =
      transform_deviation(forward, partner, Side::kValue, TransformKind::kBalanced);
  EXPECT_LE(served.inverse, kInverseLimit);
  EXPECT_LE(served.inverse_bf16, kInverseLimitBf16Balanced);
}

TEST(FitLayer, BalancedMetricsAreThoseOfTheStoredMatricesAndTheHeadsOwnMoments) {
  const int d = 24;
  const LayerStatistics s = synthetic::statistics(2, d);
  for (const Granularity granularity : {Granularity::kPerHead, Granularity::kShared}) {
    FitOptions options = balanced_options();
    options.granularity = granularity;
    const LayerTransforms t = fit_layer(s, options, Rope{});
    for (int head = 0; head < 2; ++head) {
      ASSERT_EQ(t.key.kind[head], TransformKind::kBalanced) << t.key.fallback[head];
      const MatrixD q_rotation = t.key.partner[head].cast<double>();
      const MatrixD c_q = s.q_moment[head] / static_cast<double>(s.count_q);
      MatrixD m_k = q_rotation.transpose() * c_q * q_rotation;
      m_k /= m_k.trace() / d;
      EXPECT_LE(largest(t.key.metric[head].cast<double>() - m_k), 1e-6 * largest(m_k));

      const MatrixD o_rotation = t.value.partner[head].cast<double>();
      MatrixD m_v = o_rotation * s.o_proj_metric[head] * o_rotation.transpose();
      m_v /= m_v.trace() / d;
      EXPECT_LE(largest(t.value.metric[head].cast<double>() - m_v), 1e-6 * largest(m_v));

      const MatrixD u = t.key.feedback[head].cast<double>();
      EXPECT_TRUE(u.isUpperTriangular(0));
      const MatrixD damped = m_k + kMetricDamping * MatrixD::Identity(d, d);
      MatrixD diagonal = u.inverse() * damped * u.inverse().transpose();
      diagonal.diagonal().setZero();
      EXPECT_LE(largest(diagonal), 1e-4);
    }
  }
}

TEST(FitLayer, MetricOfAnOrthogonalHeadUsesTheRotationItself) {
  const LayerStatistics s = synthetic::statistics(1, 16);
  FitOptions options = balanced_options();
  options.kind = TransformKind::kHadamard;
  const LayerTransforms t = fit_layer(s, options, Rope{});
  const MatrixD h = t.key.forward[0].cast<double>();
  MatrixD m = h.transpose() * (s.q_moment[0] / static_cast<double>(s.count_q)) * h;
  m /= m.trace() / 16;
  EXPECT_LE(largest(t.key.metric[0].cast<double>() - m), 1e-6 * largest(m));
}

TEST(FitLayer, PlainRoundingAndNoMetricScaleStoreNeitherMetricNorFeedback) {
  const LayerTransforms t = fit_layer(synthetic::statistics(1, 16), FitOptions{}, Rope{});
  EXPECT_TRUE(t.key.metric.empty());
  EXPECT_TRUE(t.value.feedback.empty());
}

TEST(ErrorMetric, IsTheCostOfAnErrorInScores) {
  const int d = 16;
  const synthetic::Rows rows = synthetic::make_rows(1, d, 500, 2, 9);
  const LayerStatistics s = synthetic::collect(rows, 10);
  FitOptions options;
  options.kind = TransformKind::kBalanced;
  const LayerTransforms t = fit_layer(s, options, Rope{});
  const MatrixD c_q = s.q_moment[0] / static_cast<double>(s.count_q);
  const MatrixD metric = error_metric(t.key.partner[0], c_q, Side::kKey);
  std::mt19937_64 generator(1);
  double first_ratio = 0;
  for (int trial = 0; trial < 5; ++trial) {
    const VectorD e = synthetic::normal_rows(1, d, generator);
    const MatrixD shift = rows.q[0] * t.key.partner[0].cast<double>() * e.transpose();
    const double ratio = (e * metric * e.transpose())(0, 0) / shift.squaredNorm();
    if (trial == 0) first_ratio = ratio;
    EXPECT_NEAR(ratio, first_ratio, 1e-9 * first_ratio);
  }
}

TEST(Checks, PassWhatTheFitMakesAndReportBothPrecisions) {
  const LayerTransforms t = fit_layer(synthetic::statistics(2, 128), balanced_options(), Rope{});
  for (const auto& [side, name] : {std::pair{&t.key, Side::kKey}, {&t.value, Side::kValue}}) {
    for (const TransformDeviation& deviation : transform_deviations(*side, name)) {
      EXPECT_LE(deviation.inverse, kInverseLimit);
      EXPECT_GT(deviation.inverse_bf16, deviation.inverse);
      EXPECT_LE(deviation.inverse_bf16, kInverseLimitBf16Balanced);
    }
  }
}

TEST(Checks, CatchATransposedPartnerADamagedEntryAndDisorder) {
  const LayerTransforms good = fit_layer(synthetic::statistics(2, 16), balanced_options(), Rope{});
  ASSERT_NO_THROW(require_valid(good.key, Side::kKey, "layer 3"));
  SideTransform bad = good.key;
  bad.partner[1] = MatrixF(good.key.partner[1].transpose());
  EXPECT_THROW(require_valid(bad, Side::kKey, "layer 3"), Error);
  EXPECT_THROW(require_valid(good.key, Side::kValue, "layer 3"), Error);
  bad = good.key;
  bad.forward[0](3, 4) += 1e-3f;
  EXPECT_THROW(require_valid(bad, Side::kKey, "layer 3"), Error);
  bad = good.key;
  bad.forward[0](3, 4) = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(require_valid(bad, Side::kKey, "layer 3"), Error);
  bad = good.key;
  std::swap(bad.eigenvalues[0][2], bad.eigenvalues[0][3]);
  EXPECT_THROW(require_valid(bad, Side::kKey, "layer 3"), Error);
  bad = good.key;
  bad.feedback[1](5, 5) = 2;
  EXPECT_THROW(require_valid(bad, Side::kKey, "layer 3"), Error);
  bad = good.key;
  bad.kind[0] = TransformKind::kOscar;  // claims to be orthogonal
  EXPECT_THROW(require_valid(bad, Side::kKey, "layer 3"), Error);
}

}  // namespace
}  // namespace oscar
