// Statistics that no healthy model gives: every one must end in finite transforms and a reason.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <optional>

#include "fit/synthetic.h"
#include "oscar/base/error.h"
#include "oscar/fit/checks.h"

namespace oscar {
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
}  // namespace oscar
