#include "oscar/fit/moments.h"

#include <gtest/gtest.h>
#include <functional>
#include <limits>
#include <optional>

#include "fit/synthetic.h"
#include "oscar/base/error.h"
#include "oscar/fit/fit.h"
#include "support/listed_offsets.h"

namespace oscar {

// Statistics that no healthy model gives: every one must end in finite transforms and a reason.

namespace {

constexpr int kHostileDim = 32;
constexpr int kTokens = 800;

struct HostileCase {
  std::string name;
  std::function<void(synthetic::Rows&)> spoil;       // works on the rows of head 0
  std::function<void(LayerStatistics&)> spoil_sums;  // then on the sums
  // What head 0 must get when the balanced one is asked; nullopt: either, with a reason.
  std::optional<TransformKind> key_kind, value_kind;
};

void for_each_rows(synthetic::Rows& rows, const std::function<void(MatrixD&)>& change) {
  for (MatrixD* m : {&rows.q[0], &rows.k[0], &rows.v[0], &rows.out[0]}) change(*m);
}

std::vector<HostileCase> hostile_cases() {
  const auto nothing = [](LayerStatistics&) {};
  std::vector<HostileCase> cases;
  cases.push_back({"RankOne",
                   [](synthetic::Rows& rows) {
                     for_each_rows(rows, [](MatrixD& m) {
                       const MatrixD scores = m.col(0);
                       const VectorD direction = m.row(1);
                       m = scores * direction;
                     });
                   },
                   nothing, TransformKind::kBalanced, TransformKind::kBalanced});
  cases.push_back(
      {"ZeroHead",
       [](synthetic::Rows& rows) { for_each_rows(rows, [](MatrixD& m) { m.setZero(); }); },
       [](LayerStatistics& s) { s.o_proj_metric[0].setZero(); }, TransformKind::kHadamard,
       TransformKind::kHadamard});
  cases.push_back({"OneTokenRepeated",
                   [](synthetic::Rows& rows) {
                     for_each_rows(rows, [](MatrixD& m) {
                       const VectorD token = m.row(0);
                       m.rowwise() = token;
                     });
                   },
                   nothing, TransformKind::kOscar, TransformKind::kOscar});
  cases.push_back({"HugeMean",
                   [](synthetic::Rows& rows) {
                     for_each_rows(rows, [](MatrixD& m) {
                       for (int j = 0; j < m.cols(); ++j) m.col(j).array() += 1e6 * (1 + j % 3);
                     });
                   },
                   nothing, TransformKind::kBalanced, TransformKind::kBalanced});
  cases.push_back({"TwelveDecades",
                   [](synthetic::Rows& rows) {
                     for_each_rows(rows, [](MatrixD& m) {
                       for (int j = 0; j < m.cols(); ++j) {
                         m.col(j) *= std::pow(10.0, -6.0 * j / (m.cols() - 1));
                       }
                     });
                   },
                   nothing, std::nullopt, std::nullopt});
  cases.push_back({"DeadChannels",
                   [](synthetic::Rows& rows) {
                     for_each_rows(rows, [](MatrixD& m) { m.leftCols(8).setZero(); });
                   },
                   nothing, std::nullopt, std::nullopt});
  cases.push_back(
      {"TinyScale",
       [](synthetic::Rows& rows) { for_each_rows(rows, [](MatrixD& m) { m *= 1e-18; }); }, nothing,
       TransformKind::kBalanced, TransformKind::kBalanced});
  cases.push_back({"OppositeDecades",
                   [](synthetic::Rows& rows) {
                     // Energy where the other side has none: cond_2(T) is about 10^4.5.
                     for (int j = 0; j < kHostileDim; ++j) {
                       const double scale = std::pow(10.0, -3.0 * j / (kHostileDim - 1));
                       rows.k[0].col(j) *= scale;
                       rows.v[0].col(j) *= scale;
                       rows.q[0].col(j) /= scale * scale;
                     }
                   },
                   [](LayerStatistics& s) {
                     for (int j = 0; j < kHostileDim; ++j) {
                       const double scale = std::pow(10.0, 6.0 * j / (kHostileDim - 1));
                       s.o_proj_metric[0].row(j) *= scale;
                       s.o_proj_metric[0].col(j) *= scale;
                     }
                   },
                   TransformKind::kOscar, TransformKind::kOscar});
  return cases;
}

class HostileStatistics : public testing::TestWithParam<HostileCase> {};

void expect_usable(const SideTransform& t, Side side) {
  EXPECT_NO_THROW(require_valid(t, side, "layer 3"));
  for (int head = 0; head < t.forward.count; ++head) {
    EXPECT_TRUE(t.forward[head].allFinite());
    EXPECT_TRUE(partner_matrix(t, side, head).allFinite());
    EXPECT_TRUE(t.eigenvalues[head].allFinite());
    EXPECT_TRUE(t.metric[head].allFinite());
    EXPECT_TRUE(t.feedback[head].allFinite());
    EXPECT_TRUE(std::isfinite(t.condition_number[head]));
  }
}

TEST_P(HostileStatistics, GiveFiniteTransformsWithAStatedFallback) {
  synthetic::Rows rows = synthetic::make_rows(2, kHostileDim, kTokens, 2, 31);
  GetParam().spoil(rows);
  LayerStatistics s = synthetic::collect(rows, 32);
  GetParam().spoil_sums(s);
  for (const Granularity granularity : {Granularity::kPerHead, Granularity::kShared}) {
    for (const bool center : {true, false}) {
      for (const int64_t span : {int64_t{0}, int64_t{131072}}) {
        for (const TransformKind kind : {TransformKind::kOscar, TransformKind::kBalanced}) {
          FitOptions options;
          options.kind = kind;
          options.granularity = granularity;
          options.center = center;
          options.position_span = span;
          options.rounding = Rounding::kShaped;
          options.scale_correction = ScaleCorrection::kMetric;
          const LayerTransforms t = fit_layer(s, options, synthetic::rope(kHostileDim));
          expect_usable(t.key, Side::kKey);
          expect_usable(t.value, Side::kValue);
          for (int head = 0; head < 2; ++head) {
            EXPECT_EQ(t.key.kind[head] == kind, t.key.fallback[head].empty());
            EXPECT_EQ(t.value.kind[head] == kind, t.value.fallback[head].empty());
          }
          if (granularity == Granularity::kPerHead && center && span == 0 &&
              kind == TransformKind::kBalanced) {
            EXPECT_EQ(t.key.kind[0], GetParam().key_kind.value_or(t.key.kind[0]))
                << t.key.fallback[0];
            EXPECT_EQ(t.value.kind[0], GetParam().value_kind.value_or(t.value.kind[0]))
                << t.value.fallback[0];
            EXPECT_EQ(t.key.kind[1], TransformKind::kBalanced) << "the healthy head";
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Fit, HostileStatistics, testing::ValuesIn(hostile_cases()),
                         [](const auto& tested) { return tested.param.name; });

TEST(HostileSums, AConditionNumberOverTheLimitIsTheStatedReason) {
  LayerStatistics s = synthetic::statistics(1, 8);
  for (int j = 0; j < 8; ++j) {
    const double scale = std::pow(10.0, -3.0 * j / 7);
    s.v_moment[0].row(j) *= scale;
    s.v_moment[0].col(j) *= scale;
    s.o_proj_metric[0].row(j) /= scale * scale;
    s.o_proj_metric[0].col(j) /= scale * scale;
  }
  FitOptions options;
  options.kind = TransformKind::kBalanced;
  const LayerTransforms t = fit_layer(s, options, Rope{});
  EXPECT_EQ(t.value.kind[0], TransformKind::kOscar);
  EXPECT_EQ(t.value.fallback[0].rfind("cond_2(T) = ", 0), 0u) << t.value.fallback[0];
  EXPECT_EQ(t.value.condition_number[0], 1);
}

TEST(HostileSums, RankDeficiencyIsReportedWithNumbers) {
  const LayerStatistics s = synthetic::statistics(1, 32, 10);  // 20 query rows, 10 tokens
  const LayerTransforms t = fit_layer(s, FitOptions{}, Rope{});
  ASSERT_EQ(t.warnings.size(), 3u);
  EXPECT_EQ(t.warnings[0],
            "layer 3: 10 tokens are few for head dimension 32; calibrate on at least 320");
  EXPECT_EQ(t.warnings[1],
            "layer 3, keys, head 0, C_Q: rank 20 of 32 from 20 rows, shrunk towards its diagonal "
            "by 0.615");
  EXPECT_NEAR(t.key.eigenvalues[0].sum(), s.q_moment[0].trace() / 20, 1e-9);
}

TEST(HostileSums, NoTokensAreAnError) {
  LayerStatistics s = make_statistics(synthetic::statistics(1, 8).geometry);
  EXPECT_THROW(fit_layer(s, FitOptions{}, Rope{}), Error);
  s.count_q = 5;
  try {
    fit_layer(s, FitOptions{}, Rope{});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.info().where, "layer 3, count_kv");
  }
}

TEST(HostileSums, ASumThatIsNotFiniteIsNamed) {
  LayerStatistics s = synthetic::statistics(2, 8);
  s.attn_out_moment[1](2, 5) = std::numeric_limits<double>::infinity();
  try {
    fit_layer(s, FitOptions{}, Rope{});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.info().where, "layer 3, attn_out_moment, head 1");
  }
}

TEST(HostileSums, NegativeSquaresAndWrongShapesAreRefused) {
  LayerStatistics s = synthetic::statistics(2, 8);
  s.k_moment[0](1, 1) = -1;
  EXPECT_THROW(fit_layer(s, FitOptions{}, Rope{}), Error);
  s = synthetic::statistics(2, 8);
  s.o_proj_metric = MatrixStack<double>(2, 4, 4);
  EXPECT_THROW(fit_layer(s, FitOptions{}, Rope{}), Error);
  s = synthetic::statistics(2, 8);
  s.v_sum = {};
  EXPECT_THROW(fit_layer(s, FitOptions{}, Rope{}), Error);
}

}  // namespace

// The position average against rows that were really rotated and against dense rotations.

namespace {

using oscar_test::mean_phase_of_offsets;

// D(p) as a dense matrix, x D(p) with x a row: both conventions, written out.
MatrixD dense_rotation(const Rope& rope, int d, double p) {
  MatrixD rotation = MatrixD::Identity(d, d);
  const int half = rope.rotary_dim / 2;
  for (int i = 0; i < half; ++i) {
    const double angle = p * rope.inv_freq[i];
    const int x = rope.interleaved ? 2 * i : i, y = rope.interleaved ? x + 1 : i + half;
    rotation(x, x) = std::cos(angle);
    rotation(y, x) = -std::sin(angle);
    rotation(x, y) = std::sin(angle);
    rotation(y, y) = std::cos(angle);
  }
  return rotation;
}

struct HeadShape {
  int d, rotary_dim;
  bool interleaved = false;
};
void PrintTo(const HeadShape& shape, std::ostream* out) {
  *out << "d " << shape.d << ", rotary " << shape.rotary_dim
       << (shape.interleaved ? ", interleaved" : "");
}

Rope rope_of(const HeadShape& shape) {
  Rope rope = synthetic::rope(shape.rotary_dim, 1e4);
  rope.interleaved = shape.interleaved;
  return rope;
}

class PositionAverage : public testing::TestWithParam<HeadShape> {
 protected:
  const int d = GetParam().d;
  const Rope rope = rope_of(GetParam());
  std::mt19937_64 generator{19};
  const MatrixD rows = synthetic::outlier_rows(50, d, 1.5, generator);
  const MatrixD moment = rows.transpose() * rows;
  const VectorD sum = rows.colwise().sum();
};

TEST_P(PositionAverage, EqualsTheMeanOfDenseRotationsOverEveryWholeOffset) {
  const int span = 700;
  MatrixD dense_moment = MatrixD::Zero(d, d);
  VectorD dense_sum = VectorD::Zero(d);
  for (int p = 0; p <= span; ++p) {
    const MatrixD rotation = dense_rotation(rope, d, p);
    dense_moment += rotation.transpose() * moment * rotation;
    dense_sum += sum * rotation;
  }
  dense_moment /= span + 1;
  dense_sum /= span + 1;
  const MeanPhase phase = mean_phase_of_span(span);
  EXPECT_LE(synthetic::largest(average_moment(moment, rope, phase) - dense_moment),
            1e-11 * synthetic::largest(moment));
  EXPECT_LE(synthetic::largest(average_sum(sum, rope, phase) - dense_sum),
            1e-11 * synthetic::largest(sum));
}

TEST_P(PositionAverage, EqualsMomentsOfRowsRotatedByTheGivenOffsets) {
  const std::vector<double> offsets = {0, 17, 4096, 100003};
  MatrixD collected = MatrixD::Zero(d, d);
  for (const double p : offsets) {
    const MatrixD rotated = rows * dense_rotation(rope, d, p);
    collected += rotated.transpose() * rotated / static_cast<double>(offsets.size());
  }
  const MatrixD averaged = average_moment(moment, rope, mean_phase_of_offsets(offsets));
  EXPECT_LE((averaged - collected).norm(), 1e-10 * collected.norm());
}

TEST_P(PositionAverage, KeepsTraceAndSymmetry) {
  const MatrixD averaged = average_moment(moment, rope, mean_phase_of_span(131072));
  EXPECT_NEAR(averaged.trace(), moment.trace(), 1e-10 * moment.trace());
  EXPECT_LE(synthetic::largest(averaged - averaged.transpose()),
            1e-15 * synthetic::largest(moment));
}

INSTANTIATE_TEST_SUITE_P(HeadShapes, PositionAverage,
                         testing::Values(HeadShape{16, 16}, HeadShape{16, 8}, HeadShape{32, 32},
                                         HeadShape{6, 2}, HeadShape{8, 0}, HeadShape{16, 16, true},
                                         HeadShape{16, 8, true}));

TEST(MeanPhase, OfALongSpanEqualsTheSumOverEveryOffset) {
  std::vector<double> offsets;
  for (int p = 0; p <= 131072; ++p) offsets.push_back(p);
  const MeanPhase closed = mean_phase_of_span(131072), listed = mean_phase_of_offsets(offsets);
  for (const double omega : {0.0, 1e-13, 1e-6, 0.03, 0.31830988618, 1.0, 2.0, -1.3, 3.14159265}) {
    EXPECT_LE(std::abs(closed(omega) - listed(omega)), 1e-9) << omega;
  }
}

TEST(MeanPhase, OfAShortSpanTakesSixtyFourOffsets) {
  std::vector<double> offsets;
  for (int i = 0; i < 64; ++i) offsets.push_back(10.0 * i / 63);
  const MeanPhase closed = mean_phase_of_span(10), listed = mean_phase_of_offsets(offsets);
  EXPECT_LE(std::abs(closed(0.7) - listed(0.7)), 1e-13);
}

TEST(MeanPhase, OfNoSpanChangesNothing) {
  EXPECT_EQ(mean_phase_of_span(0)(1.0), std::complex<double>(1.0, 0.0));
}

TEST(MeanPhase, OfServedPositionsWeighsTheFirstSixteenthByAQuarterMore) {
  std::vector<double> offsets;  // 0 .. 1600 three times, 0 .. 100 as much in all as one of these
  for (int p = 0; p <= 1600; ++p) offsets.push_back(p);
  const MeanPhase all = mean_phase_of_offsets(offsets);
  offsets.resize(101);
  const MeanPhase early = mean_phase_of_offsets(offsets), served = mean_phase_of_served(1600);
  for (const double omega : {0.0, 1e-4, 3e-3, 0.7}) {
    EXPECT_LE(std::abs(served(omega) - (3.0 * all(omega) + early(omega)) / 4.0), 1e-12) << omega;
  }
}

TEST(ServedPosition, HasItsShareOfTheWeightBelowIt) {
  const int64_t span = 131072;
  EXPECT_EQ(served_position(0, span), 0);
  EXPECT_NEAR(served_position(1, span), span, 1e-6);
  for (const double share : {0.1, 0.25, 0.3, 0.7}) {
    const double part = served_position(share, span) / span;
    const double below = kEarlyShare * std::min(part / kEarlyPart, 1.0) + (1 - kEarlyShare) * part;
    EXPECT_NEAR(below, share, 1e-12);
  }
}

TEST(LayerMoments, CenterOnTheAveragedMeanOfTheServedPositions) {
  const int d = 16, span = 1600;
  const synthetic::Rows rows = synthetic::make_rows(2, d, 200, 2, 5);
  const Rope rope = synthetic::rope(d, 100.0);
  FitOptions options;
  options.center = true;
  options.position_span = span;
  const LayerMoments m = layer_moments(synthetic::collect(rows, 6), options, rope);
  for (int head = 0; head < 2; ++head) {
    // All rows at all offsets, and once more at the first sixteenth of them: a third as much.
    const int early = span / 16;
    const double weight = kEarlyShare / (1 - kEarlyShare) * (span + 1) / (early + 1);
    VectorD sum = VectorD::Zero(d);
    MatrixD moment = MatrixD::Zero(d, d);
    double count = 0;
    for (int p = 0; p <= span; ++p) {
      const MatrixD turned = rows.k[head] * dense_rotation(rope, d, p);
      const double w = p <= early ? 1 + weight : 1;
      sum += w * turned.colwise().sum();
      moment += w * turned.transpose() * turned;
      count += w * 200;
    }
    const VectorD mean = sum / count;
    const MatrixD covariance = moment / count - mean.transpose() * mean;
    EXPECT_LE(synthetic::largest(m.key_mean[head] - mean), 1e-10);
    EXPECT_LE((m.key[head] - covariance).norm(), 1e-10 * covariance.norm());
    // Values do not depend on position.
    const VectorD value_mean = rows.v[head].colwise().mean();
    EXPECT_LE(synthetic::largest(m.value_mean[head] - value_mean), 1e-12);
  }
}

TEST(LayerMoments, OfALayerThatIsNotTurnedAreThoseOfAModelWithoutRope) {
  LayerStatistics statistics = synthetic::statistics(2, 16);
  FitOptions options;
  options.center = true;
  options.position_span = 1600;
  const LayerMoments turned = layer_moments(statistics, options, synthetic::rope(16, 100.0));
  statistics.geometry.turned = false;
  const LayerMoments still = layer_moments(statistics, options, synthetic::rope(16, 100.0));
  const LayerMoments without = layer_moments(statistics, options, Rope{});
  EXPECT_EQ(still.key.data, without.key.data);
  EXPECT_EQ(still.query.data, without.query.data);
  EXPECT_NE(still.key.data, turned.key.data);
}

TEST(PositionAverageErrors, ARopeThatDoesNotFitTheHeadIsRefused) {
  const MatrixD moment = MatrixD::Identity(8, 8);
  EXPECT_THROW(average_moment(moment, synthetic::rope(16), mean_phase_of_span(9)), Error);
  Rope broken = synthetic::rope(8);
  broken.inv_freq.pop_back();
  EXPECT_THROW(average_moment(moment, broken, mean_phase_of_span(9)), Error);
}

}  // namespace
}  // namespace oscar
