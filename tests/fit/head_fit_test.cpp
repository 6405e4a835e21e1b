#include "oscar/fit/head_fit.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <future>
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

// The balanced transform, the metrics, the feedback factor and the load checks.

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

// Heads of different fits side by side, each with what it needs and no more.

namespace {

LayerTransforms balanced_fit(const LayerStatistics& statistics) {
  return fit_layer(statistics,
                   {.kind = TransformKind::kBalanced,
                    .center = true,
                    .rounding = Rounding::kShaped,
                    .scale_correction = ScaleCorrection::kMetric},
                   Rope{});
}

TEST(ComposeHeads, PutsShapedAndPlainHeadsOfDifferentFitsTogether) {
  const LayerStatistics statistics = synthetic::statistics(2, 16);
  const LayerTransforms balanced = balanced_fit(statistics);
  const LayerTransforms plain = fit_layer(statistics, {.kind = TransformKind::kOscar}, Rope{});
  ASSERT_TRUE(plain.key.metric.empty() && plain.key.feedback.empty());
  const SideTransform mixed =
      compose_heads({{.fit = &balanced.key,
                      .head = 1,
                      .recipe = {.clip_ratio = 0.9f,
                                 .scale_correction = ScaleCorrection::kMetric,
                                 .rounding = Rounding::kShaped}},
                     {.fit = &plain.key, .head = 0, .recipe = {.clip_ratio = 0.8f}}},
                    Side::kKey);
  EXPECT_EQ(mixed.kind, (std::vector{TransformKind::kBalanced, TransformKind::kOscar}));
  EXPECT_EQ(mixed.recipe.clip_ratio, (std::vector{0.9f, 0.8f}));
  EXPECT_EQ(mixed.metric[0], balanced.key.metric[1]);
  EXPECT_EQ(mixed.feedback[0], balanced.key.feedback[1]);
  EXPECT_EQ(mixed.mean[0], balanced.key.mean[1]);
  EXPECT_EQ(mixed.partner[0], balanced.key.partner[1]);
  EXPECT_EQ(MatrixF(mixed.partner[1]), MatrixF(plain.key.forward[0]));
  EXPECT_TRUE(mixed.feedback[1].isIdentity(0));
  for (int head = 0; head < 2; ++head) {  // what a reader of the file makes of the factors
    EXPECT_EQ(mixed.recipe[head].rounding, rounding_of(mixed.feedback, head));
  }
  EXPECT_EQ(mixed.recipe[0].rounding, Rounding::kShaped);
  EXPECT_EQ(plain.key.recipe[0].rounding, Rounding::kPlain);  // has no factors at all
  EXPECT_NO_THROW(require_valid(mixed, Side::kKey, "test"));
}

TEST(ComposeHeads, LeavesOutWhatNoHeadNeeds) {
  const LayerTransforms balanced = balanced_fit(synthetic::statistics(2, 16));
  const LayerTransforms plain =
      fit_layer(synthetic::statistics(2, 16), {.kind = TransformKind::kHadamard}, Rope{});
  const SideTransform no_writer = compose_heads({{.fit = &balanced.value}}, Side::kValue);
  EXPECT_TRUE(no_writer.metric.empty() && no_writer.feedback.empty());
  EXPECT_EQ(no_writer.partner.count, 1);
  const SideTransform orthogonal =
      compose_heads({{.fit = &plain.value}, {.fit = &plain.value, .head = 1}}, Side::kValue);
  EXPECT_TRUE(orthogonal.partner.empty());
}

}  // namespace

// Decompositions are shared between fits and threads.

namespace {

TEST(Decompositions, OfEqualMatricesAreOneFromAnyThread) {
  std::mt19937_64 generator(3);
  const MatrixD rows = synthetic::normal_rows(200, 64, generator);
  const MatrixD moment = rows.transpose() * rows;
  Decompositions decompositions;
  std::vector<std::future<const Eigh*>> found;
  for (int i = 0; i < 8; ++i) {
    found.push_back(std::async(std::launch::async, [&, i] {
      const MatrixD own = i % 2 ? MatrixD(moment) : MatrixD(2 * moment);
      return &decompositions.of(own, "test");
    }));
  }
  std::vector<const Eigh*> all;
  for (auto& one : found) all.push_back(one.get());
  for (size_t i = 2; i < all.size(); ++i) EXPECT_EQ(all[i], all[i - 2]);
  EXPECT_NE(all[0], all[1]);
  const Eigh alone = eigh(moment, "test");
  EXPECT_EQ(all[1]->vectors, alone.vectors) << "side by side, the same bits";
  EXPECT_EQ(all[1]->values, alone.values);
}

TEST(Decompositions, FailForEveryoneWhoAsks) {
  Decompositions decompositions;
  MatrixD broken = MatrixD::Identity(4, 4);
  broken(1, 2) = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 2; ++i) EXPECT_THROW(decompositions.of(broken, "test"), Error);
}

}  // namespace

// Centres of keys a segment, against sums over every position.

namespace {

constexpr int kKeyDim = 8;
constexpr int64_t kThreeSegments = 2500;  // positions 0 to 3071 are served

// Row x at position p, in the arithmetic of complex numbers.
VectorD turned(const VectorD& x, const Rope& rope, double position) {
  VectorD out = x;
  const int half = rope.rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const auto z = std::complex<double>(x[i], x[i + half]) *
                   std::polar(1.0, rope.inv_freq[static_cast<size_t>(i)] * position);
    out[i] = z.real(), out[i + half] = z.imag();
  }
  return out;
}

// What of the weight lies on a position: a quarter on the first of three segments, the rest evenly.
double weight_of(int64_t position) {
  return (position < kSegmentTokens ? kEarlyShare / kSegmentTokens : 0.0) +
         (1 - kEarlyShare) / (3.0 * kSegmentTokens);
}

// A layer of one head whose rows have weights; the last few are sinks far from the others.
struct WithSinks {
  static constexpr int kRows = 40, kSinks = 4;
  synthetic::Rows rows = synthetic::make_rows(1, kKeyDim, kRows, 2, 21);
  std::vector<double> weights;
  LayerStatistics statistics;

  explicit WithSinks(bool sinks = true) {
    statistics = synthetic::collect(rows, 22);
    statistics.geometry.quantized = true;
    AttendedSums& a = statistics.attended = make_attended_sums(statistics.geometry);
    a.q_moment[0] = rows.q[0].transpose() * rows.q[0];
    a.q_weight[0] = static_cast<double>(rows.q[0].rows());
    a.v_moment[0] = rows.v[0].transpose() * rows.v[0];
    a.v_sum[0] = rows.v[0].colwise().sum();
    a.v_weight[0] = kRows;
    for (int i = 0; i < kRows; ++i) {
      const bool sink = sinks && i >= kRows - kSinks;
      if (sink) rows.k[0].row(i).array() += 5;
      weights.push_back(sink ? 11 : 0.2 + 0.1 * (i % 3));
      const VectorD k = rows.k[0].row(i);
      a.k_moment[0] += weights.back() * k.transpose() * k;
      a.k_sum[0] += weights.back() * k;
      a.k_weight[0] += weights.back();
      if (!sink) continue;
      a.k_sink_sum[0] += weights.back() * k;
      a.k_sink_weight[0] += weights.back();
    }
  }
};

FitOptions with_centres() {
  FitOptions options;
  options.kind = TransformKind::kBalanced;
  options.row_weights = RowWeights::kAttention;
  options.center = options.key_centres = true;
  options.position_span = kThreeSegments;
  return options;
}

TEST(SegmentPhase, IsTheMeanOverTheSegmentAboutItsMiddle) {
  for (const double omega : {0.0, 1e-6, 3e-3, 0.7, 3.1}) {
    std::complex<double> sum = 0;
    for (int p = 0; p < kSegmentTokens; ++p)
      sum += std::polar(1.0, omega * (p - segment_middle(0)));
    EXPECT_NEAR(segment_phase(omega), sum.real() / kSegmentTokens, 1e-12) << omega;
    EXPECT_NEAR(sum.imag(), 0, 1e-9);
  }
}

TEST(SegmentPhase, TimesThatOfTheMiddlesIsThatOfAllPositions) {
  const MeanPhase middles = mean_phase_of_segments(kThreeSegments);
  for (const double omega : {0.0, 1e-4, 2e-3, 0.9}) {
    std::complex<double> all = 0, of_middles = 0;
    for (int64_t p = 0; p < 3 * kSegmentTokens; ++p) {
      all += weight_of(p) * std::polar(1.0, omega * static_cast<double>(p));
      of_middles += weight_of(p) * std::polar(1.0, omega * segment_middle(p / kSegmentTokens));
    }
    EXPECT_LT(std::abs(middles(omega) - of_middles), 1e-12) << omega;
    EXPECT_LT(std::abs(middles(omega) * segment_phase(omega) - all), 1e-12) << omega;
  }
}

TEST(KeyCentres, MomentIsThatOfWhatKeysDifferByFromTheirCentreAtEveryPosition) {
  const WithSinks text;
  const Rope rope = synthetic::rope(kKeyDim);
  const LayerMoments m = layer_moments(text.statistics, with_centres(), rope);
  EXPECT_EQ(m.warning, "");
  MatrixD moment = MatrixD::Zero(kKeyDim, kKeyDim);
  VectorD mean = VectorD::Zero(kKeyDim);
  const double total = text.statistics.attended.k_weight[0];
  for (int64_t p = 0; p < 3 * kSegmentTokens; ++p) {
    for (int i = 0; i < WithSinks::kRows; ++i) {
      const int j = i >= WithSinks::kRows - WithSinks::kSinks;
      const VectorD key = turned(text.rows.k[0].row(i), rope, static_cast<double>(p));
      const VectorD centre =
          turned(m.key_centres[0].row(j), rope, segment_middle(p / kSegmentTokens));
      const VectorD rest = key - centre;
      const double w = weight_of(p) * text.weights[static_cast<size_t>(i)] / total;
      moment += w * rest.transpose() * rest;
      mean += w * key;
    }
  }
  EXPECT_LT((m.key[0] - moment).norm(), 1e-9 * moment.norm());
  EXPECT_LT((m.key_mean[0] - mean).norm(), 1e-9 * mean.norm());
  // No other centres leave less: each is the mean over its segment of the rows that it is for.
  const LayerMoments one = layer_moments(WithSinks(false).statistics, with_centres(), rope);
  EXPECT_EQ(VectorD(one.key_centres[0].row(0)), VectorD(one.key_centres[0].row(1)));
}

TEST(KeyCentres, LeaveLessToCodeThanOneMean) {
  const WithSinks text;
  const Rope rope = synthetic::rope(kKeyDim);
  FitOptions one = with_centres();
  one.key_centres = false;
  const double with_two = layer_moments(text.statistics, with_centres(), rope).key[0].trace();
  EXPECT_LT(with_two, 0.8 * layer_moments(text.statistics, one, rope).key[0].trace());
}

TEST(KeyCentres, AreNotThereWithAWarningWhereTheyCannotBe) {
  const WithSinks text;
  const Rope rope = synthetic::rope(kKeyDim);
  FitOptions uncentred = with_centres(), even = with_centres(), collected = with_centres();
  uncentred.center = false;
  even.row_weights = RowWeights::kEven;
  collected.position_span = 0;
  for (const FitOptions& options : {uncentred, even, collected}) {
    const LayerMoments m = layer_moments(text.statistics, options, rope);
    EXPECT_TRUE(m.key_centres.empty());
    EXPECT_NE(m.warning, "");
    FitOptions without = options;
    without.key_centres = false;
    EXPECT_EQ(m.key, layer_moments(text.statistics, without, rope).key);
  }
}

TEST(KeyCentres, TableHasThemTurnedTransformedAndRoundedForEverySegment) {
  Rope rope = synthetic::rope(kKeyDim);
  rope.max_positions = 2049;
  const LayerTransforms layer = fit_layer(WithSinks().statistics, with_centres(), rope);
  ASSERT_TRUE(has_centres(layer.key));
  EXPECT_FALSE(has_centres(layer.value));
  const std::vector<float> table = centre_rows(layer.key, rope);
  ASSERT_EQ(table.size(), 3u * kCentres * kKeyDim);
  for (int s = 0; s < 3; ++s) {
    for (int j = 0; j < kCentres; ++j) {
      const VectorD expected =
          (turned(layer.key.centres[0].row(j).cast<double>(), rope, s * 1024 + 511.5) -
           layer.key.mean[0].cast<double>()) *
          layer.key.forward[0].cast<double>();
      for (int i = 0; i < kKeyDim; ++i) {
        const float found = table[static_cast<size_t>((s * kCentres + j) * kKeyDim + i)];
        EXPECT_NEAR(found, expected[i], 0.004 * std::abs(expected[i]) + 1e-6);
        EXPECT_EQ(found, bf16_to_float(float_to_bf16(found)));
      }
    }
  }
}

TEST(KeyCentres, OfAHeadWithoutThemAreZeros) {
  Rope rope = synthetic::rope(kKeyDim);
  rope.max_positions = 1024;
  LayerTransforms layer = fit_layer(WithSinks().statistics, with_centres(), rope);
  layer.key.centres[0].setZero();
  EXPECT_FALSE(has_centres(layer.key));
  for (const float entry : centre_rows(layer.key, rope)) EXPECT_EQ(entry, 0);
}

}  // namespace

// OSCAR's rotation: composition, invariances, granularity, positions.

namespace {

using synthetic::from_identity;
using synthetic::largest;

TEST(OscarRotation, IsOrthogonalAndKeepsTheTrace) {
  for (const int d : {1, 8, 12, 64, 96, 128, 256}) {
    const LayerStatistics s = synthetic::statistics(1, d, 600);
    const MatrixD c = s.q_moment[0] / static_cast<double>(s.count_q);
    const OscarRotation r = oscar_rotation(eigh(c, "test"));
    EXPECT_LE(from_identity(r.rotation.transpose() * r.rotation), 1e-12) << d;
    EXPECT_NEAR(r.eigenvalues.sum(), c.trace(), 1e-11 * c.trace()) << d;
  }
}

TEST(OscarRotation, OfADistinctDiagonalIsTheShuffledHadamardWrittenOut) {
  // Energies 40, 10, 30, 20: ascending eigenvectors are e1, e3, e2, e0. U H has row e1 = H row 0,
  // e3 = H row 1, e2 = H row 2, e0 = H row 3; perm of 4 is [3, 1, 2, 0].
  const MatrixD c = (VectorD(4) << 40, 10, 30, 20).finished().asDiagonal();
  MatrixD expected(4, 4);
  expected << 1, -1, -1, 1,  //
      1, 1, 1, 1,            //
      -1, 1, -1, 1,          //
      -1, -1, 1, 1;
  const OscarRotation r = oscar_rotation(eigh(c, "test"));
  EXPECT_LE(largest(r.rotation - 0.5 * expected), 1e-15) << r.rotation;
  EXPECT_EQ(r.eigenvalues, (VectorD(4) << 10, 20, 30, 40).finished());
}

TEST(OscarRotation, SpreadsTheEnergyEvenlyOverAllColumns) {
  const LayerStatistics s = synthetic::statistics(1, 128, 3000);
  const MatrixD c = s.q_moment[0] / static_cast<double>(s.count_q);
  const OscarRotation r = oscar_rotation(eigh(c, "test"));
  const MatrixD rotated = r.rotation.transpose() * c * r.rotation;
  for (int i = 0; i < 128; ++i) EXPECT_NEAR(rotated(i, i), c.trace() / 128, 1e-10 * c.trace());
}

TEST(FitLayer, OscarUsesQueriesForKeysAndAttentionOutputsForValues) {
  const LayerStatistics s = synthetic::statistics(2, 32);
  const LayerTransforms t = fit_layer(s, FitOptions{}, Rope{});
  for (int head = 0; head < 2; ++head) {
    const MatrixD c_q = s.q_moment[head] / static_cast<double>(s.count_q);
    const MatrixD c_s = s.attn_out_moment[head] / static_cast<double>(s.count_q);
    EXPECT_EQ(MatrixF(t.key.forward[head]), oscar_rotation(eigh(c_q, "q")).rotation.cast<float>());
    EXPECT_EQ(MatrixF(t.value.forward[head]),
              oscar_rotation(eigh(c_s, "s")).rotation.cast<float>());
    EXPECT_EQ(t.key.kind[head], TransformKind::kOscar);
    EXPECT_EQ(t.key.fallback[head], "");
  }
  EXPECT_TRUE(t.key.partner.empty());
  EXPECT_TRUE(t.warnings.empty());
  EXPECT_TRUE(std::isnan(t.predicted_output_nmse[1]));
}

TEST(FitLayer, EnergyObjectiveUsesTheEnergyMoment) {
  LayerStatistics s = synthetic::statistics(1, 16);
  FitOptions options;
  options.objective_v = ValueObjective::kEnergy;
  EXPECT_THROW(fit_layer(s, options, Rope{}), Error);
  s.v_energy_moment = s.k_moment;
  const LayerTransforms t = fit_layer(s, options, Rope{});
  const MatrixD c = s.k_moment[0] / static_cast<double>(s.count_kv);
  EXPECT_EQ(MatrixF(t.value.forward[0]), oscar_rotation(eigh(c, "energy")).rotation.cast<float>());
}

TEST(FitLayer, SharedFitsThePlainMeanOverHeadsAndWritesItForEachHead) {
  const LayerStatistics s = synthetic::statistics(3, 16);
  FitOptions options;
  options.granularity = Granularity::kShared;
  const LayerTransforms t = fit_layer(s, options, Rope{});
  const MatrixD mean = (s.q_moment[0] + s.q_moment[1] + s.q_moment[2]) / (3.0 * s.count_q);
  const OscarRotation expected = oscar_rotation(eigh(mean, "mean"));
  for (int head = 0; head < 3; ++head) {
    EXPECT_LE((t.key.forward[head] - expected.rotation.cast<float>()).cwiseAbs().maxCoeff(), 1e-6f);
    EXPECT_EQ(MatrixF(t.key.forward[head]), MatrixF(t.key.forward[0]));
    EXPECT_LE(largest(t.key.eigenvalues[head] - expected.eigenvalues),
              1e-12 * expected.eigenvalues[15]);
  }
}

TEST(FitLayer, ScoresAndOutputsAreUnchangedByEveryKind) {
  const int d = 24;
  const synthetic::Rows rows = synthetic::make_rows(2, d, 900, 2, 23);
  const LayerStatistics s = synthetic::collect(rows, 24);
  for (const TransformKind kind : {TransformKind::kIdentity, TransformKind::kHadamard,
                                   TransformKind::kOscar, TransformKind::kBalanced}) {
    for (const bool center : {false, true}) {
      FitOptions options;
      options.kind = kind;
      options.center = center;
      const LayerTransforms t = fit_layer(s, options, Rope{});
      for (int head = 0; head < 2; ++head) {
        EXPECT_EQ(t.key.kind[head], kind) << t.key.fallback[head];
        EXPECT_EQ(t.value.kind[head], kind) << t.value.fallback[head];
        const VectorD k_mean = t.key.mean[head].cast<double>();
        const MatrixD k = rows.k[head].rowwise() - k_mean;
        const MatrixD q_side = partner_matrix(t.key, Side::kKey, head).cast<double>();
        const MatrixD scores =
            (rows.q[head] * q_side) * (k * t.key.forward[head].cast<double>()).transpose();
        const MatrixD exact = rows.q[head] * k.transpose();
        EXPECT_LE(largest(scores - exact), 1e-5 * largest(exact));

        const VectorD v_mean = t.value.mean[head].cast<double>();
        const MatrixD v = (rows.v[head].rowwise() - v_mean) * t.value.forward[head].cast<double>();
        const MatrixD o_side = partner_matrix(t.value, Side::kValue, head).cast<double>();
        const MatrixD again = (v * o_side).rowwise() + v_mean;
        EXPECT_LE(largest(again - rows.v[head]), 1e-5 * largest(rows.v[head]));
      }
      EXPECT_NO_THROW(require_valid(t.key, Side::kKey, "layer 3"));
      EXPECT_NO_THROW(require_valid(t.value, Side::kValue, "layer 3"));
    }
  }
}

TEST(FitLayer, MeansAreThoseOfTheRowsAndZeroWithoutCentring) {
  const synthetic::Rows rows = synthetic::make_rows(2, 8, 300, 2, 3);
  const LayerStatistics s = synthetic::collect(rows, 4);
  FitOptions options;
  EXPECT_EQ(VectorF(fit_layer(s, options, Rope{}).key.mean[1]), VectorF::Zero(8));
  options.center = true;
  const LayerTransforms t = fit_layer(s, options, Rope{});
  const VectorF k_mean = rows.k[1].colwise().mean().cast<float>();
  const VectorF v_mean = rows.v[1].colwise().mean().cast<float>();
  EXPECT_LE((t.key.mean[1] - k_mean).cwiseAbs().maxCoeff(), 1e-6f);
  EXPECT_LE((t.value.mean[1] - v_mean).cwiseAbs().maxCoeff(), 1e-6f);
}

TEST(FitLayer, HadamardAndIdentityNeedNoDirections) {
  const LayerStatistics s = synthetic::statistics(1, 12, 50);
  FitOptions options;
  options.kind = TransformKind::kHadamard;
  const LayerTransforms t = fit_layer(s, options, Rope{});
  EXPECT_EQ(MatrixF(t.key.forward[0]), hadamard(12).cast<float>());
  EXPECT_EQ(VectorD(t.key.eigenvalues[0]), VectorD::Ones(12));
  options.kind = TransformKind::kIdentity;
  EXPECT_EQ(MatrixF(fit_layer(s, options, Rope{}).value.forward[0]), MatrixF::Identity(12, 12));
}

TEST(FitLayer, EqualStatisticsGiveEqualBytes) {
  const LayerStatistics s = synthetic::statistics(2, 64);
  FitOptions options;
  options.kind = TransformKind::kBalanced;
  options.center = true;
  options.position_span = 131072;
  options.rounding = Rounding::kShaped;
  options.scale_correction = ScaleCorrection::kMetric;
  const Rope rope = synthetic::rope(64);
  const LayerTransforms a = fit_layer(s, options, rope), b = fit_layer(s, options, rope);
  EXPECT_EQ(a.key.forward, b.key.forward);
  EXPECT_EQ(a.key.partner, b.key.partner);
  EXPECT_EQ(a.key.eigenvalues, b.key.eigenvalues);
  EXPECT_EQ(a.value.feedback, b.value.feedback);
  EXPECT_EQ(a.value.metric, b.value.metric);
}

TEST(FitLayer, PositionsChangeKeysAndLeaveValuesAlone) {
  const LayerStatistics s = synthetic::statistics(1, 16);
  FitOptions options;
  const Rope rope = synthetic::rope(16);
  const LayerTransforms still = fit_layer(s, options, rope);
  options.position_span = 4096;
  const LayerTransforms moved = fit_layer(s, options, rope);
  EXPECT_EQ(still.value.forward, moved.value.forward);
  EXPECT_FALSE(still.key.forward == moved.key.forward);
}

}  // namespace

// The loss model against rows, its minimum, and what it cannot see.

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

// Rows counted by the attention that they receive.

namespace {

constexpr int kHeads = 2, kDim = 8;

// Sums of rows with random weights, keys before a RoPE that a test may choose.
struct Weighted {
  synthetic::Rows rows = synthetic::make_rows(kHeads, kDim, 500, 2, 11);
  LayerStatistics statistics;
  std::vector<double> key_weights, value_weights, query_weights;  // of rows, the same in all heads

  Weighted() {
    std::mt19937_64 generator(3);
    std::exponential_distribution<double> draw;
    for (int i = 0; i < 500; ++i) {
      key_weights.push_back(draw(generator));
      value_weights.push_back(draw(generator));
    }
    for (int i = 0; i < 1000; ++i) query_weights.push_back(draw(generator));
    statistics = synthetic::collect(rows, 12);
    statistics.geometry.quantized = true;
    AttendedSums& a = statistics.attended = make_attended_sums(statistics.geometry);
    for (size_t h = 0; h < kHeads; ++h) {
      const auto add = [&](const MatrixD& x, const std::vector<double>& w, auto moment,
                           double& total) {
        for (int i = 0; i < x.rows(); ++i) {
          moment += w[static_cast<size_t>(i)] * x.row(i).transpose() * x.row(i);
          total += w[static_cast<size_t>(i)];
        }
      };
      const int head = static_cast<int>(h);
      add(rows.q[h], query_weights, a.q_moment[head], a.q_weight[h]);
      add(rows.k[h], key_weights, a.k_moment[head], a.k_weight[h]);
      add(rows.v[h], value_weights, a.v_moment[head], a.v_weight[h]);
      for (int i = 0; i < 500; ++i) {
        a.k_sum[head] += key_weights[static_cast<size_t>(i)] * rows.k[h].row(i);
        a.v_sum[head] += value_weights[static_cast<size_t>(i)] * rows.v[h].row(i);
      }
    }
  }
};

FitOptions by_attention() {
  FitOptions options;
  options.row_weights = RowWeights::kAttention;
  options.center = true;
  options.position_span = 4096;
  return options;
}

// Weighted covariance about the weighted mean, row by row.
MatrixD covariance(const MatrixD& x, const std::vector<double>& weights) {
  VectorD mean = VectorD::Zero(x.cols());
  MatrixD moment = MatrixD::Zero(x.cols(), x.cols());
  double total = 0;
  for (const double w : weights) total += w;
  for (int i = 0; i < x.rows(); ++i) mean += weights[static_cast<size_t>(i)] / total * x.row(i);
  for (int i = 0; i < x.rows(); ++i) {
    const VectorD rest = x.row(i) - mean;
    moment += weights[static_cast<size_t>(i)] / total * rest.transpose() * rest;
  }
  return moment;
}

TEST(RowWeights, MomentsAreThoseOfWeightedRows) {
  const Weighted text;
  const Rope no_rope;
  const LayerMoments m = layer_moments(text.statistics, by_attention(), no_rope);
  EXPECT_EQ(m.warning, "");
  for (int h = 0; h < kHeads; ++h) {
    const auto head = static_cast<size_t>(h);
    const MatrixD value = covariance(text.rows.v[head], text.value_weights);
    EXPECT_LT((m.value[h] - value).norm(), 1e-10 * value.norm());
    const MatrixD key = covariance(text.rows.k[head], text.key_weights);
    EXPECT_LT((m.key[h] - key).norm(), 1e-10 * key.norm());
    EXPECT_GT((m.query[h] - text.statistics.q_moment[h] / 1000).norm(), 1e-3 * m.query[h].norm());
  }
}

TEST(RowWeights, KeysAreTurnedToTheServedPositionsFromBeforeRope) {
  const Weighted text;
  const Rope rope = synthetic::rope(kDim);
  const LayerMoments m = layer_moments(text.statistics, by_attention(), rope);
  const MeanPhase phase = mean_phase_of_served(4096);
  const AttendedSums& a = text.statistics.attended;
  for (int h = 0; h < kHeads; ++h) {
    const double weight = a.k_weight[static_cast<size_t>(h)];
    const VectorD mean = average_sum(VectorD(a.k_sum[h] / weight), rope, phase);
    const MatrixD about_zero = average_moment(MatrixD(a.k_moment[h] / weight), rope, phase);
    EXPECT_LT((m.key_mean[h] - mean).norm(), 1e-12 * mean.norm());
    EXPECT_LT((m.key[h] - (about_zero - mean.transpose() * mean)).norm(), 1e-10 * m.key[h].norm());
  }
}

TEST(RowWeights, AreNotAskedForByDefault) {
  const Weighted text;
  LayerStatistics without = text.statistics;
  without.attended = {};
  FitOptions options = by_attention();
  options.row_weights = RowWeights::kEven;
  const Rope rope = synthetic::rope(kDim);
  EXPECT_EQ(layer_moments(text.statistics, options, rope).key,
            layer_moments(without, options, rope).key);
}

TEST(RowWeights, AreEvenWithAWarningWhereTheyWereNotCollected) {
  Weighted text;
  text.statistics.attended = {};
  const Rope rope = synthetic::rope(kDim);
  const LayerTransforms fitted = fit_layer(text.statistics, by_attention(), rope);
  EXPECT_NE(fitted.warnings.at(0).find("all rows count alike"), std::string::npos);
  FitOptions even = by_attention();
  even.row_weights = RowWeights::kEven;
  EXPECT_EQ(fitted.key.forward, fit_layer(text.statistics, even, rope).key.forward);
}

TEST(RowWeights, AreEvenWithAWarningAtPositionsAsCollected) {
  const Weighted text;
  FitOptions options = by_attention();
  options.position_span = 0;
  EXPECT_NE(layer_moments(text.statistics, options, {}).warning, "");
}

TEST(RowWeights, OfAHeadThatNothingReadAreEven) {
  Weighted text;
  text.statistics.attended.q_weight[1] = 0;
  FitOptions even = by_attention();
  even.row_weights = RowWeights::kEven;
  const Rope rope = synthetic::rope(kDim);
  const LayerMoments found = layer_moments(text.statistics, by_attention(), rope);
  const LayerMoments expected = layer_moments(text.statistics, even, rope);
  EXPECT_EQ(MatrixD(found.value[1]), MatrixD(expected.value[1]));
  EXPECT_NE(MatrixD(found.value[0]), MatrixD(expected.value[0]));
}

TEST(RowWeights, OfAddedSumsAreThoseOfBothTexts) {
  const Weighted text;
  LayerStatistics total = text.statistics, other = text.statistics;
  add_statistics(total, other);
  EXPECT_EQ(total.attended.k_weight[0], 2 * text.statistics.attended.k_weight[0]);
  EXPECT_EQ(remaining_statistics(total, other).attended.v_moment,
            text.statistics.attended.v_moment);
  other.attended = {};
  add_statistics(total, other);
  EXPECT_TRUE(total.attended.empty());
  EXPECT_EQ(total.count_kv, 3 * text.statistics.count_kv);
}

}  // namespace

// Summaries of eigenvalue spectra whose answers are known.

namespace {

TEST(Spectrum, OfEqualEigenvaluesHasFullEffectiveRank) {
  const SpectrumSummary s = summarise_spectrum(VectorD::Constant(128, 3.0));
  EXPECT_NEAR(s.effective_rank, 128, 1e-9);
  EXPECT_NEAR(s.participation_ratio, 128, 1e-9);
  EXPECT_DOUBLE_EQ(s.top_share, 1.0 / 128);
  EXPECT_EQ(s.dimensions_for_99_percent, 127);
  EXPECT_DOUBLE_EQ(s.trace, 384);
}

TEST(Spectrum, OfOneDirectionHasEffectiveRankOne) {
  const SpectrumSummary s = summarise_spectrum((VectorD(4) << -1e-18, 0, 0, 5).finished());
  EXPECT_DOUBLE_EQ(s.effective_rank, 1);
  EXPECT_DOUBLE_EQ(s.participation_ratio, 1);
  EXPECT_EQ(s.rank, 1);
  EXPECT_EQ(s.dimensions_for_99_percent, 1);
}

TEST(Spectrum, OfHalfAndTwoQuartersIsAsOnPaper) {
  const SpectrumSummary s = summarise_spectrum((VectorD(3) << 1, 1, 2).finished());
  EXPECT_NEAR(s.effective_rank, std::exp(1.5 * std::log(2.0)), 1e-12);
  EXPECT_NEAR(s.participation_ratio, 16.0 / 6.0, 1e-12);
  EXPECT_EQ(describe(s), "effective rank 2.8 of 3, participation 2.7, top share 50.0%, 99% in 3");
}

TEST(Spectrum, OfAZeroHeadSaysSo) {
  EXPECT_EQ(describe(summarise_spectrum(VectorD::Zero(8))), "no energy in 8 dimensions");
}

}  // namespace
}  // namespace oscar
