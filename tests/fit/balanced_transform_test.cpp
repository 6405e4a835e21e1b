// The balanced transform, the metrics, the feedback factor and the load checks.
#include "oscar/fit/head_fit.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "fit/synthetic.h"
#include "oscar/base/error.h"
#include "oscar/cache/codec.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/linalg.h"
#include "oscar/fit/moments.h"
#include "oscar/fit/statistics.h"

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

BalancedBasis basis_of(const MatrixD& covariance, const MatrixD& weight) {
  return balanced_basis(covariance, eigh(covariance, "test"), weight, "test");
}

BalancedTransform plain_transform(const MatrixD& covariance, const MatrixD& weight) {
  return plain_balanced_transform(basis_of(covariance, weight), "test");
}

TEST(BalancedTransform, TimesItsInverseIsTheIdentityAndRowsHaveUnitMeanSquare) {
  for (const int d : {8, 12, 64, 96, 128}) {
    const LayerStatistics s = synthetic::statistics(1, d, 2000);
    FitOptions options;
    options.center = true;
    const LayerMoments m = layer_moments(s, options, Rope{});
    const MatrixD c_k = m.key[0], c_q = m.query[0];
    const BalancedTransform t = plain_transform(c_k, c_q);
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
  const BalancedTransform t = plain_transform(m.key[0], m.query[0]);
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
  const BalancedTransform t = plain_transform(covariance, weight);
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

// Mean of D in M = U D U^T, what an error of one channel costs when later ones answer it.
double mean_shaped_cost(const BalancedTransform& t, const MatrixD& weight) {
  const MatrixD m = t.inverse * weight * t.inverse.transpose();
  const MatrixD inverse = udu_factor(m, "test").inverse();
  return (inverse * m * inverse.transpose()).diagonal().mean();
}

TEST(ShapedBalancedTransform, CostsEveryChannelTheSameAndLessThanThePlainOne) {
  const int d = 64;
  FitOptions options;
  options.center = true;
  const LayerMoments m = layer_moments(synthetic::statistics(1, d), options, Rope{});
  const auto lifted = [](MatrixD moment) {  // so that no eigenvalue has to be raised
    moment.diagonal().array() += 0.02 * moment.diagonal().mean();
    return moment;
  };
  const MatrixD covariance = lifted(m.key[0]), weight = lifted(m.query[0]);
  const BalancedBasis basis = basis_of(covariance, weight);
  const auto energy = [&](const BalancedTransform& t) {
    return (t.forward.transpose() * covariance * t.forward).trace() / d;
  };
  const auto loss = [&](const BalancedTransform& t) {
    return energy(t) * mean_shaped_cost(t, weight);
  };
  const VectorD spectrum = basis.product.values;
  const auto log_det = [](const MatrixD& x) { return eigenvalues(x, "test").array().log().sum(); };
  double before = loss(plain_balanced_transform(basis, "test"));
  for (const double exponent : {0.25, 0.15, 0.1, 0.0}) {
    const BalancedTransform t = shaped_balanced_transform(basis, exponent, "test");
    EXPECT_NEAR(energy(t), 1.0, 0x1p-8) << "as of the plain transform";
    // The product of the costs is det M, and T has the determinant of its factors.
    const VectorD held = spectrum.array().pow(2 * exponent).matrix();
    const double least = held.mean() * std::exp((log_det(covariance) + log_det(weight)) / d -
                                                held.array().log().mean());
    // T is rounded to bf16, and each of its entries has a share in both factors.
    EXPECT_NEAR(loss(t) / least, 1.0, 0x1p-6) << exponent;
    EXPECT_LT(loss(t), before) << exponent;
    before = loss(t);
  }
}

TEST(ShapedBalancedTransform, IsWhatShapedRowsGetAndPlainRowsDoNot) {
  const LayerStatistics s = synthetic::statistics(1, 32);
  FitOptions options = balanced_options();
  const LayerMoments m = layer_moments(s, options, Rope{});
  const BalancedBasis basis = basis_of(m.key[0], m.query[0]);
  EXPECT_EQ(MatrixF(fit_layer(s, options, Rope{}).key.forward[0]),
            shaped_balanced_transform(basis, kShapedExponents[0], "test").forward.cast<float>());
  options.rounding = Rounding::kPlain;
  EXPECT_EQ(MatrixF(fit_layer(s, options, Rope{}).key.forward[0]),
            plain_balanced_transform(basis, "test").forward.cast<float>());
}

// Variances v over n decades, weights v^(-1/2): D = v^(1/2) and T = v^(a/2 - 1/2) Q in their common
// basis, so cond_2(T) = 10^(n (1 - a) / 2): 178 to 501 for a = 0.1, 75 to 178 for a = 0.25.
TEST(ShapedBalancedTransform, GivesWayToAGentlerOneWhereBf16WouldNotServeIt) {
  const int d = 64;
  LayerStatistics s = synthetic::statistics(1, d);
  s.v_sum[0].setZero();
  const FitOptions options = balanced_options();
  std::mt19937_64 generator(5);
  std::vector<int> taken(std::size(kShapedExponents), 0);
  for (int i = 0; i <= 20; ++i) {
    const double decades = 5 + 0.05 * i;
    const MatrixD mixing = synthetic::normal_rows(d, d, generator).householderQr().householderQ();
    VectorD variance(d);
    for (int j = 0; j < d; ++j) variance[j] = std::pow(10.0, decades * j / (d - 1));
    s.v_moment[0] =
        static_cast<double>(s.count_kv) * mixing * variance.asDiagonal() * mixing.transpose();
    s.o_proj_metric[0] =
        mixing * variance.cwiseSqrt().cwiseInverse().asDiagonal() * mixing.transpose();
    const LayerMoments m = layer_moments(s, options, Rope{});
    const BalancedBasis basis = basis_of(m.value[0], m.output_metric[0]);
    const auto transform = [&](double exponent) {
      return shaped_balanced_transform(basis, exponent, "test");
    };
    const auto first = std::find_if(
        std::begin(kShapedExponents), std::end(kShapedExponents), [&](double exponent) {
          const BalancedTransform t = transform(exponent);
          return deviation_problem(
                     transform_deviation(t.forward.cast<float>(), t.inverse.cast<float>(),
                                         Side::kValue, TransformKind::kBalanced),
                     TransformKind::kBalanced)
              .empty();
        });
    const LayerTransforms t = fit_layer(s, options, Rope{});
    if (first == std::end(kShapedExponents)) {
      EXPECT_EQ(t.value.kind[0], TransformKind::kOscar) << decades;
      continue;
    }
    ASSERT_EQ(t.value.kind[0], TransformKind::kBalanced) << t.value.fallback[0];
    EXPECT_EQ(MatrixF(t.value.forward[0]), transform(*first).forward.cast<float>()) << decades;
    ++taken[static_cast<size_t>(first - std::begin(kShapedExponents))];
  }
  EXPECT_GT(taken[0], 0);
  EXPECT_GT(taken[1] + taken[2], 0) << "these cases show nothing";
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
