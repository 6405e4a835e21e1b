// Centers of keys a segment, against sums over every position.
#include "oscar/fit/head_fit.h"

#include <gtest/gtest.h>
#include <cmath>
#include <complex>
#include <vector>

#include "fit/synthetic.h"
#include "oscar/cache/codec.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/linalg.h"
#include "oscar/fit/moments.h"
#include "oscar/fit/statistics.h"

namespace oscar {
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

FitOptions with_centers() {
  FitOptions options;
  options.kind = TransformKind::kBalanced;
  options.row_weights = RowWeights::kAttention;
  options.center = options.key_centers = true;
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

TEST(KeyCenters, MomentIsThatOfWhatKeysDifferByFromTheirCenterAtEveryPosition) {
  const WithSinks text;
  const Rope rope = synthetic::rope(kKeyDim);
  const LayerMoments m = layer_moments(text.statistics, with_centers(), rope);
  EXPECT_EQ(m.warning, "");
  MatrixD moment = MatrixD::Zero(kKeyDim, kKeyDim);
  VectorD mean = VectorD::Zero(kKeyDim);
  const double total = text.statistics.attended.k_weight[0];
  for (int64_t p = 0; p < 3 * kSegmentTokens; ++p) {
    for (int i = 0; i < WithSinks::kRows; ++i) {
      const int j = i >= WithSinks::kRows - WithSinks::kSinks;
      const VectorD key = turned(text.rows.k[0].row(i), rope, static_cast<double>(p));
      const VectorD center =
          turned(m.key_centers[0].row(j), rope, segment_middle(p / kSegmentTokens));
      const VectorD rest = key - center;
      const double w = weight_of(p) * text.weights[static_cast<size_t>(i)] / total;
      moment += w * rest.transpose() * rest;
      mean += w * key;
    }
  }
  EXPECT_LT((m.key[0] - moment).norm(), 1e-9 * moment.norm());
  EXPECT_LT((m.key_mean[0] - mean).norm(), 1e-9 * mean.norm());
  // No other centers leave less: each is the mean over its segment of the rows that it is for.
  const LayerMoments one = layer_moments(WithSinks(false).statistics, with_centers(), rope);
  EXPECT_EQ(VectorD(one.key_centers[0].row(0)), VectorD(one.key_centers[0].row(1)));
}

TEST(KeyCenters, LeaveLessToCodeThanOneMean) {
  const WithSinks text;
  const Rope rope = synthetic::rope(kKeyDim);
  FitOptions one = with_centers();
  one.key_centers = false;
  const double with_two = layer_moments(text.statistics, with_centers(), rope).key[0].trace();
  EXPECT_LT(with_two, 0.8 * layer_moments(text.statistics, one, rope).key[0].trace());
}

TEST(KeyCenters, AreNotThereWithAWarningWhereTheyCannotBe) {
  const WithSinks text;
  const Rope rope = synthetic::rope(kKeyDim);
  FitOptions uncentered = with_centers(), even = with_centers(), collected = with_centers();
  uncentered.center = false;
  even.row_weights = RowWeights::kEven;
  collected.position_span = 0;
  for (const FitOptions& options : {uncentered, even, collected}) {
    const LayerMoments m = layer_moments(text.statistics, options, rope);
    EXPECT_TRUE(m.key_centers.empty());
    EXPECT_NE(m.warning, "");
    FitOptions without = options;
    without.key_centers = false;
    EXPECT_EQ(m.key, layer_moments(text.statistics, without, rope).key);
  }
}

TEST(KeyCenters, TableHasThemTurnedTransformedAndRoundedForEverySegment) {
  Rope rope = synthetic::rope(kKeyDim);
  rope.max_positions = 2049;
  const LayerTransforms layer = fit_layer(WithSinks().statistics, with_centers(), rope);
  ASSERT_TRUE(has_centers(layer.key));
  EXPECT_FALSE(has_centers(layer.value));
  const std::vector<float> table = center_rows(layer.key, rope);
  ASSERT_EQ(table.size(), 3u * kCenters * kKeyDim);
  for (int s = 0; s < 3; ++s) {
    for (int j = 0; j < kCenters; ++j) {
      const VectorD expected =
          (turned(layer.key.centers[0].row(j).cast<double>(), rope, s * 1024 + 511.5) -
           layer.key.mean[0].cast<double>()) *
          layer.key.forward[0].cast<double>();
      for (int i = 0; i < kKeyDim; ++i) {
        const float found = table[static_cast<size_t>((s * kCenters + j) * kKeyDim + i)];
        EXPECT_NEAR(found, expected[i], 0.004 * std::abs(expected[i]) + 1e-6);
        EXPECT_EQ(found, bf16_to_float(float_to_bf16(found)));
      }
    }
  }
}

TEST(KeyCenters, OfAHeadWithoutThemAreZeros) {
  Rope rope = synthetic::rope(kKeyDim);
  rope.max_positions = 1024;
  LayerTransforms layer = fit_layer(WithSinks().statistics, with_centers(), rope);
  layer.key.centers[0].setZero();
  EXPECT_FALSE(has_centers(layer.key));
  for (const float entry : center_rows(layer.key, rope)) EXPECT_EQ(entry, 0);
}

}  // namespace
}  // namespace oscar
