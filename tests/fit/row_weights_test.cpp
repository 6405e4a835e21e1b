// Rows counted by the attention that they receive.
#include "oscar/fit/moments.h"

#include <gtest/gtest.h>
#include <random>
#include <string>
#include <vector>

#include "fit/synthetic.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/linalg.h"
#include "oscar/fit/statistics.h"

namespace oscar {
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

TEST(RowWeights, AreNamedAsTheyWereUsed) {
  const Weighted text;
  LayerStatistics without = text.statistics, unread = text.statistics, exact = text.statistics;
  without.attended = {};
  unread.attended.q_weight.assign(unread.attended.q_weight.size(), 0.0);  // no row was INT2
  exact.geometry.quantized = false;
  const FitOptions asked = by_attention();
  EXPECT_EQ(used_row_weights({text.statistics, text.statistics, exact}, asked), "attention");
  EXPECT_EQ(used_row_weights({without, unread}, asked), "even");
  EXPECT_EQ(used_row_weights({text.statistics, without}, asked), kMixedRowWeights);
  EXPECT_EQ(used_row_weights({exact}, asked), "attention");
  FitOptions even = asked, collected = asked;
  even.row_weights = RowWeights::kEven;
  collected.position_span = 0;
  EXPECT_EQ(used_row_weights({text.statistics}, even), "even");
  EXPECT_EQ(used_row_weights({text.statistics}, collected), "even");
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
}  // namespace oscar
