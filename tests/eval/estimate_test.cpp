// Estimates against formulas worked out by hand and by enumeration.
#include "oscar/eval/estimate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "oscar/base/error.h"

namespace {

TEST(Estimate, UnitsAreSequencesWhenThereAreEnoughOtherwiseStretchesOfThem) {
  EXPECT_EQ(oscar::make_units({2, 1, 2, 1, 1, 1, 1, 1}),
            (std::vector<int32_t>{0, 0, 1, 2, 2, 3, 4, 5, 6, 7}));
  const auto units = oscar::make_units({1000, 10});
  EXPECT_EQ(units[511], 0);
  EXPECT_EQ(units[512], 1);
  EXPECT_EQ(units[999], 1);
  EXPECT_EQ(units[1000], 2);
}

TEST(Estimate, WithOneTokenPerUnitTheErrorIsThatOfTheMean) {
  const std::vector<double> values = {1, 2, 4, 9};
  const auto e = oscar::estimate(values, {0, 1, 2, 3});
  EXPECT_DOUBLE_EQ(e.mean, 4);
  EXPECT_NEAR(e.se, std::sqrt((9 + 4 + 0 + 25) / 3.0 / 4.0), 1e-12);
}

TEST(Estimate, TokensThatRepeatWithinAUnitDoNotLookLikeMoreEvidence) {
  std::vector<double> once = {1, 2, 4, 9}, often;
  std::vector<int32_t> units;
  for (int u = 0; u < 4; ++u) {
    often.insert(often.end(), 50, once[u]);
    units.insert(units.end(), 50, u);
  }
  EXPECT_NEAR(oscar::estimate(often, units).se, oscar::estimate(once, {0, 1, 2, 3}).se, 1e-12);
  EXPECT_TRUE(std::isnan(oscar::estimate(often, std::vector<int32_t>(200, 0)).se));
}

TEST(Estimate, TheBootstrapIntervalCoversAKnownDifferenceAndIsReproducible) {
  std::mt19937_64 random(1);
  std::normal_distribution<double> noise(0, 1);
  std::vector<double> a, b;
  std::vector<int32_t> units;
  for (int u = 0; u < 40; ++u) {
    for (int i = 0; i < 25; ++i) {
      b.push_back(noise(random));
      a.push_back(b.back() + 0.5 + 0.1 * noise(random));
      units.push_back(u);
    }
  }
  const auto d = oscar::paired_bootstrap(a, b, units, 7);
  EXPECT_LT(d.low, 0.5);
  EXPECT_GT(d.high, 0.5);
  // 1000 differences of spread 0.1: the pairing removes the spread of 1 that both share.
  EXPECT_NEAR(d.high - d.low, 2 * 1.96 * 0.1 / std::sqrt(1000.0), 0.004);
  const auto again = oscar::paired_bootstrap(a, b, units, 7);
  EXPECT_EQ(d.low, again.low);
  EXPECT_EQ(d.high, again.high);
}

TEST(Estimate, QuantilesInterpolateBetweenOrderStatistics) {
  const auto q = oscar::quantiles({4, 1, 3, 2}, {0, 0.5, 0.9, 1});
  EXPECT_DOUBLE_EQ(q[0], 1);
  EXPECT_DOUBLE_EQ(q[1], 2.5);
  EXPECT_NEAR(q[2], 3.7, 1e-12);
  EXPECT_DOUBLE_EQ(q[3], 4);
}

TEST(Estimate, WilsonIntervalsHaveTheKnownValues) {
  const auto [low, high] = oscar::wilson_interval(45, 48);
  EXPECT_NEAR(low, 0.8316, 1e-4);
  EXPECT_NEAR(high, 0.9785, 1e-4);
  EXPECT_EQ(oscar::wilson_interval(0, 10).first, 0);
  EXPECT_LT(oscar::wilson_interval(10, 10).first, 1);
}

TEST(Estimate, McNemarCountsOnlyDisagreements) {
  EXPECT_DOUBLE_EQ(oscar::mcnemar_exact(0, 0), 1);
  EXPECT_DOUBLE_EQ(oscar::mcnemar_exact(3, 3), 1);
  EXPECT_NEAR(oscar::mcnemar_exact(0, 6), 2.0 / 64, 1e-12);
  EXPECT_NEAR(oscar::mcnemar_exact(8, 1), 2 * (1 + 9) / 512.0, 1e-12);
}

TEST(Estimate, FiguresOnFewTokensAreRefused) {
  EXPECT_NO_THROW(oscar::require_enough_tokens(100, "perplexity"));
  EXPECT_THROW(oscar::require_enough_tokens(99, "perplexity"), oscar::Error);
}

}  // namespace
