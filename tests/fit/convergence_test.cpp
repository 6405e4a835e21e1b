#include "oscar/fit/convergence.h"

#include <gtest/gtest.h>
#include <cmath>
#include <numbers>

#include "fit/synthetic.h"
#include "oscar/base/error.h"
#include "oscar/fit/head_fit.h"

namespace oscar {

// Parts of a text: their sums, what they say about the whole, and the words for it.

namespace {

constexpr int kDim = 16, kHeads = 3, kQueries = 2;

// Tokens [first, first + count) of `rows`, all with one output projection.
LayerStatistics sums_of(const synthetic::Rows& rows, int first, int count) {
  synthetic::Rows part;
  for (int h = 0; h < kHeads; ++h) {
    part.q.emplace_back(rows.q[h].middleRows(first * kQueries, count * kQueries));
    part.k.emplace_back(rows.k[h].middleRows(first, count));
    part.v.emplace_back(rows.v[h].middleRows(first, count));
    part.out.emplace_back(rows.out[h].middleRows(first * kQueries, count * kQueries));
  }
  return synthetic::collect(part, 99);
}

FitOptions centered() {
  FitOptions options;
  options.kind = TransformKind::kBalanced;
  options.center = true;
  return options;
}

// Judged from copies at a quarter and at half of the first `tokens` rows.
LayerConvergence judged(const synthetic::Rows& rows, int tokens) {
  const LayerStatistics quarter = sums_of(rows, 0, tokens / 4), half = sums_of(rows, 0, tokens / 2);
  return layer_convergence({&quarter, &half}, sums_of(rows, 0, tokens), centered(), {});
}

TEST(RemainingStatistics, AreTheSumsOfWhatCameLater) {
  const synthetic::Rows rows = synthetic::make_rows(kHeads, kDim, 900, kQueries, 5);
  const LayerStatistics total = sums_of(rows, 0, 900);
  const LayerStatistics rest = remaining_statistics(total, sums_of(rows, 0, 500));
  const LayerStatistics direct = sums_of(rows, 500, 400);
  EXPECT_EQ(rest.count_kv, direct.count_kv);
  EXPECT_EQ(rest.count_q, direct.count_q);
  EXPECT_EQ(rest.o_proj_metric, total.o_proj_metric);
  for (int h = 0; h < kHeads; ++h) {
    // Sums here are made of 900 rows each, so B of the header's bound is 900.
    const VectorD scale = total.k_moment[h].diagonal().transpose().cwiseSqrt();
    const MatrixD bound = 900 * 0x1p-53 * scale.transpose() * scale;
    const MatrixD off = (rest.k_moment[h] - direct.k_moment[h]).cwiseAbs();
    EXPECT_TRUE((off.array() <= bound.array()).all());
    EXPECT_LT((rest.q_sum[h] - direct.q_sum[h]).norm(), 1e-9 * direct.q_sum[h].norm());
    EXPECT_GE(rest.v_moment[h].diagonal().minCoeff(), 0);
  }
}

TEST(RemainingStatistics, OfALaterStateAreRefused) {
  const synthetic::Rows rows = synthetic::make_rows(kHeads, kDim, 100, kQueries, 6);
  const LayerStatistics all = sums_of(rows, 0, 100);
  EXPECT_THROW(remaining_statistics(sums_of(rows, 0, 50), all), Error);
  EXPECT_THROW(remaining_statistics(all, all), Error);
  EXPECT_THROW(remaining_statistics(all, synthetic::statistics(1, kDim, 50)), Error);
}

TEST(Convergence, TheCostIsWhatTheFitLosesOnTextThatItHasNotSeen) {
  const int kTokens = 2000, kFresh = 60000;
  const synthetic::Rows rows = synthetic::make_rows(kHeads, kDim, kTokens + kFresh, kQueries, 7);
  const LayerConvergence cost = judged(rows, kTokens);
  const LayerTransforms fit = fit_layer(sums_of(rows, 0, kTokens), centered(), {});
  const LayerStatistics fresh = sums_of(rows, kTokens, kFresh);
  const LayerTransforms best = fit_layer(fresh, centered(), {});
  const LayerMoments moments = scoring_moments(fresh, {}, {});
  for (const Side side : {Side::kKey, Side::kValue}) {
    const bool key = side == Side::kKey;
    const auto losses = predicted_losses(key ? fit.key : fit.value, side, moments);
    const auto least = predicted_losses(key ? best.key : best.value, side, moments);
    double excess = 0;
    for (int h = 0; h < kHeads; ++h) excess += (losses[h] / least[h] - 1) / kHeads;
    // Both are means of sums of some d^2 / 2 squared errors of three heads: within a third.
    const double predicted = (key ? cost.key : cost.value).mean_cost;
    EXPECT_GT(predicted, 0.67 * excess) << (key ? "keys" : "values");
    EXPECT_LT(predicted, 1.5 * excess) << (key ? "keys" : "values");
    EXPECT_GT(excess, 1e-4);  // far above the rounding of T
  }
}

TEST(Convergence, MoreTextCostsLessAndTurnsEigenspacesLess) {
  const synthetic::Rows rows = synthetic::make_rows(kHeads, kDim, 16000, kQueries, 8);
  const LayerConvergence few = judged(rows, 1000), many = judged(rows, 16000);
  for (const auto side : {&LayerConvergence::key, &LayerConvergence::value}) {
    // 16 times the text: a sixteenth of the cost, a quarter of the angles, give or take.
    EXPECT_LT((many.*side).mean_cost, (few.*side).mean_cost / 8);
    EXPECT_GT((many.*side).mean_cost, (few.*side).mean_cost / 32);
    EXPECT_LT((many.*side).mean_angle, (few.*side).mean_angle / 2);
    EXPECT_GE((few.*side).worst_cost, (few.*side).mean_cost);
    EXPECT_GE((few.*side).largest_angle, (few.*side).mean_angle);
  }
  ASSERT_EQ(many.splits.size(), 3U);
  EXPECT_EQ(many.splits[0], (ConvergenceSplit{4000, 8000}));
  // c (1/n + 1/m): 3/8 against 2/8 of a thousandth.
  EXPECT_GT(many.key.excess[0], many.key.excess[1]);
}

TEST(Convergence, ATextOfTwoKindsDoesNotLookConverged) {
  const int kHalf = 4000;
  synthetic::Rows rows = synthetic::make_rows(kHeads, kDim, 2 * kHalf, kQueries, 9);
  const double mixed = judged(rows, 2 * kHalf).key.mean_cost;
  const synthetic::Rows other = synthetic::make_rows(kHeads, kDim, kHalf, kQueries, 10);
  for (int h = 0; h < kHeads; ++h) {
    rows.k[h].bottomRows(kHalf) = other.k[h];
    rows.q[h].bottomRows(kHalf * kQueries) = other.q[h];
  }
  // 20 times the cost is one kind of text with a twentieth of the tokens. Found: 6,200 times.
  EXPECT_GT(judged(rows, 2 * kHalf).key.mean_cost, 20 * mixed);
}

TEST(Convergence, NeedsTwoPartsWithRowsEnough) {
  EXPECT_NE(convergence_problem({5000}, 128).find("one batch"), std::string::npos);
  EXPECT_EQ(convergence_problem({1280, 2560}, 128), "");
  EXPECT_NE(convergence_problem({1279, 2560}, 128).find("1279"), std::string::npos);
  EXPECT_NE(convergence_problem({600, 1280, 2559}, 128).find("1279"), std::string::npos);
}

LayerConvergence layer_of(int id, double key_cost, double value_cost) {
  LayerConvergence layer;
  layer.layer_id = id;
  layer.splits = {{500, 500}, {500, 500}};
  layer.key = {.mean_angle = 3,
               .largest_angle = 9,
               .mean_cost = key_cost,
               .worst_cost = 2 * key_cost,
               .excess = {4 * key_cost, 4 * key_cost}};
  layer.value = {.mean_angle = 5,
                 .largest_angle = 7,
                 .mean_cost = value_cost,
                 .worst_cost = value_cost,
                 .excess = {4 * value_cost, 4 * value_cost}};
  return layer;
}

TEST(ConvergenceRecord, SaysEnoughOrHowMuchToUse) {
  const Json enough =
      convergence_record({layer_of(0, 0.01, 0.002), layer_of(2, 0.02, 0.002)}, 100000, "");
  EXPECT_FALSE(needs_more_text(enough));
  EXPECT_NEAR(enough["cost"].get<double>(), 0.015, 1e-12);
  EXPECT_EQ(enough["key"]["worst_layer"], 2);
  EXPECT_FALSE(enough.contains("tokens_needed"));
  EXPECT_EQ(convergence_lines(enough).at(0),
            "enough: the choice of text costs about 1.5% of predicted loss");
  EXPECT_EQ(convergence_lines(enough).at(1),
            "at 100,000 tokens: keys 1.5%, values 0.20%, worst layer 2.0%");

  const Json more = convergence_record({layer_of(0, 0.051, 0.002)}, 100000, "");
  EXPECT_TRUE(needs_more_text(more));
  EXPECT_EQ(more["tokens_needed"], 260000);  // 100,000 * 0.051 / 0.02, two digits, upwards
  // (1 + c/N) to (1 + c/2N)
  EXPECT_NEAR(more["fall_per_doubling"].get<double>(), 1 - 1.0255 / 1.051, 1e-12);
  EXPECT_EQ(convergence_lines(more).at(0),
            "not enough: predicted loss still falls by 2.4% per doubling;");
  EXPECT_EQ(convergence_lines(more).at(1),
            "use about 260,000 tokens (keys 5.1%, values 0.20% at 100,000)");
}

TEST(ConvergenceRecord, WithoutFiguresSaysWhy) {
  const Json record =
      convergence_record({}, 300, "the text is one batch, without two parts: use more");
  EXPECT_FALSE(needs_more_text(record));
  EXPECT_EQ(
      convergence_lines(record),
      std::vector<std::string>{"not judged: the text is one batch, without two parts: use more"});
}

TEST(ConvergenceRecord, OfAnotherProgramIsReadAsFarAsItGoes) {
  for (const char* text :
       {"null", "[]", "3", "{}", R"({"cost":"x","tokens":1})", R"({"tokens":1,"key":3,"value":[]})",
        R"({"enough":false})", R"({"key":{"cost":1},"value":{"cost":null},"tokens":2})"}) {
    EXPECT_TRUE(convergence_lines(Json::parse(text)).empty()) << text;
    EXPECT_EQ(verdict_lines(Json::parse(text)).at(0),
              "not judged: the file keeps no verdict on it");
  }
  for (const char* text : {R"({"problem":7})", R"({"tokens":1e300,"key":{"cost":1e300},)"
                                               R"("value":{"cost":-1},"enough":false})"}) {
    EXPECT_FALSE(convergence_lines(Json::parse(text)).empty()) << text;
  }
}

}  // namespace

// Subspaces whose angles are known.

namespace {

constexpr int kAngleDim = 16;

MatrixD random_basis(std::mt19937_64& generator) {
  const MatrixD m = synthetic::normal_rows(kAngleDim, kAngleDim, generator);
  return eigh(m + m.transpose(), "random").vectors;
}

TEST(PrincipalAngles, AreThoseByWhichPlanesWereTurned) {
  std::mt19937_64 generator(1);
  const MatrixD basis = random_basis(generator);
  const double turns[] = {0.1, 0.7, 1.2};
  MatrixD a = basis.leftCols(3), b(kAngleDim, 3);
  for (int i = 0; i < 3; ++i) {
    b.col(i) = std::cos(turns[i]) * basis.col(i) + std::sin(turns[i]) * basis.col(8 + i);
  }
  // Bases of the same spaces: angles belong to the spaces.
  const MatrixD small = synthetic::normal_rows(3, 3, generator);
  b *= eigh(small + small.transpose(), "turn").vectors;
  const VectorD angles = principal_angles(a, b, "test");
  ASSERT_EQ(angles.size(), 3);
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(angles[i], turns[i], 1e-12);
}

TEST(PrincipalAngles, AreZeroWithinASpaceAndRightBetweenSpacesThatShareNothing) {
  std::mt19937_64 generator(2);
  const MatrixD basis = random_basis(generator);
  const VectorD inside = principal_angles(basis.leftCols(5), basis.middleCols(1, 2), "test");
  ASSERT_EQ(inside.size(), 2);
  EXPECT_LT(inside.maxCoeff(), 1e-7);  // the rounding that the header names
  const VectorD apart = principal_angles(basis.leftCols(4), basis.rightCols(6), "test");
  ASSERT_EQ(apart.size(), 4);
  EXPECT_NEAR(apart.minCoeff(), std::numbers::pi / 2, 1e-7);
}

TEST(LeadingDimensions, AreTheFewestThatHoldTheShare) {
  const VectorD values{{-1e-18, 1.0, 2.0, 3.0, 4.0}};
  EXPECT_EQ(leading_dimensions(values, 0.4), 1);
  EXPECT_EQ(leading_dimensions(values, 0.41), 2);
  EXPECT_EQ(leading_dimensions(values, 0.9), 3);
  EXPECT_EQ(leading_dimensions(values, 1.0), 4);
  EXPECT_EQ(leading_dimensions(VectorD::Zero(3), 0.9), 0);
}

}  // namespace
}  // namespace oscar
