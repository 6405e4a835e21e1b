#include "oscar/eval/estimate.h"

#include <gtest/gtest.h>
#include <cmath>
#include <random>

#include "oscar/base/error.h"
#include "oscar/eval/report/report_data.h"

// Estimates against formulas worked out by hand and by enumeration.

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

TEST(Estimate, FewUnitsHaveNoInterval) {
  const std::vector<double> a = {3, 5, 4, 3, 5, 4, 4, 4}, b(8, 1);
  for (const int32_t units : {1, 2, 7, 8}) {
    std::vector<int32_t> of_token;
    for (int32_t i = 0; i < 8; ++i) of_token.push_back(std::min(i, units - 1));
    const auto d = oscar::paired_bootstrap(a, b, of_token, 7);
    EXPECT_DOUBLE_EQ(d.mean, 3);
    EXPECT_EQ(std::isnan(d.low), units < oscar::kFewestUnits) << units;
    EXPECT_EQ(std::isnan(d.high), units < oscar::kFewestUnits) << units;
  }
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

// Shares of an evaluation that a bundle has seen, and when they are worth a warning.

namespace {

using namespace oscar;

// `length` ids, no n-gram twice and none in two texts of different `start`.
std::vector<int32_t> text(int start, int length) {
  std::vector<int32_t> ids;
  for (int i = 0; i < length; ++i) ids.push_back(start + i);
  return ids;
}

Json report_with(const Json& overlap) {
  return {{"bundle", {{"file", "a.h5"}, {"overlap", overlap}}}};
}

TEST(Overlap, CountsTheTextThatIsEvaluated) {
  const auto fingerprint = fingerprint_of({text(0, 112), text(1000, 112)});
  const Json half = overlap_json(fingerprint, {text(0, 112), text(5000, 112)}, 10);
  EXPECT_EQ(half["sampled"], 200);
  EXPECT_EQ(half["found"], 100);
  EXPECT_DOUBLE_EQ(half["share"].get<double>(), 0.5);
  EXPECT_LT(half["low"].get<double>(), 0.5);
  EXPECT_GT(half["high"].get<double>(), 0.5);
  // The first one is too short to be counted from position 112 on.
  EXPECT_EQ(overlap_json(fingerprint, {text(0, 112), text(5000, 113)}, 112)["found"], 0);
}

TEST(Overlap, IsUnknownWithoutAFingerprintOrWithoutNgrams) {
  EXPECT_EQ(overlap_json({}, {text(0, 100)}, 0), (Json{{"known", false}}));
  CorpusRecord calibrated, evaluated;
  calibrated.sources = {{.name = "a", .sha256 = "1"}, {.name = "b", .sha256 = "2"}};
  evaluated.sources = {{.name = "c", .sha256 = "2", .tokens_used = 300},
                       {.name = "d", .sha256 = "3", .tokens_used = 100},
                       {.name = "self:1", .tokens_used = 100}};
  EXPECT_EQ(same_files_json(calibrated, evaluated)["share"], 0.6);
  evaluated.sources.erase(evaluated.sources.begin());
  EXPECT_EQ(same_files_json(calibrated, evaluated), (Json{{"known", false}}));
  EXPECT_EQ(overlap_json(fingerprint_of({text(0, 100)}), {text(0, 12)}, 0)["known"], false);
}

TEST(Overlap, IsWarnedOfWhenItIsNotableAndNotByChance) {
  const auto fingerprint = fingerprint_of({text(0, 5012)});
  const auto warnings = [&](int shared, int others) {
    return cautions_of(report_with(
        overlap_json(fingerprint, {text(0, shared + 12), text(10000, others + 12)}, 0)));
  };
  EXPECT_TRUE(warnings(0, 1000).empty());
  EXPECT_TRUE(warnings(5, 995).empty());  // under one in a hundred
  EXPECT_TRUE(warnings(1, 49).empty());   // two in a hundred, but of one draw
  ASSERT_EQ(warnings(250, 750).size(), 1U);
  EXPECT_EQ(warnings(250, 750)[0].kind, "shared-text");
  EXPECT_EQ(warnings(250, 750)[0].sentence,
            "25% of the evaluation's 13-grams are in the calibration text of a.h5: the figures "
            "flatter the bundle; evaluate on other text");
}

TEST(Overlap, OfNamedBundlesIsWarnedOfToo) {
  const Json overlap = overlap_json(fingerprint_of({text(0, 500)}), {text(0, 500)}, 0);
  const Json report = {{"bundle", nullptr},
                       {"bundles",
                        {{"one", {{"file", "one.h5"}, {"overlap", overlap}}},
                         {"two", {{"file", "two.h5"}, {"overlap", {{"known", false}}}}}}}};
  ASSERT_EQ(cautions_of(report).size(), 1U);
  EXPECT_EQ(cautions_of(report)[0].method, "one");
  EXPECT_NE(cautions_of(report)[0].sentence.find("one.h5"), std::string::npos);
  EXPECT_TRUE(cautions_of(Json::object()).empty());
  EXPECT_TRUE(cautions_of({{"bundle", {{"overlap", {{"low", "x"}}}}}, {"bundles", 3}}).empty());
}

}  // namespace

// Overlapping windows score every token once, each with a full context.

namespace {

using oscar::strided_windows;

// Tokens 0 .. count - 1 of one source, cut every `stride`.
oscar::TokenSequences stream(int count, int stride, const char* kind = "text") {
  oscar::TokenSequences pieces;
  for (int i = 0; i < count; ++i) {
    if (i % stride == 0) pieces.sequences.emplace_back();
    pieces.sequences.back().push_back(i);
  }
  pieces.record.sources.push_back({.name = "a", .kind = kind});
  pieces.record.tokens = count;
  return pieces;
}

TEST(StridedWindows, EachScoredTokenHasTheWholeStreamBeforeItUpToTheWindow) {
  const auto windows = strided_windows(stream(23, 4), 12, 4);  // the piece of 3 is left out
  ASSERT_EQ(windows.size(), 3u);
  int next = 8;  // the first token with 8 before it
  for (const auto& window : windows) {
    ASSERT_EQ(window.size(), 12u);
    for (int i = 0; i < 12; ++i) EXPECT_EQ(window[i], window[0] + i);
    for (int i = 8; i < 12; ++i) EXPECT_EQ(window[i], next++);
  }
  EXPECT_EQ(next, 20);
}

TEST(StridedWindows, AStrideOfTheWindowCutsWithoutOverlap) {
  const auto windows = strided_windows(stream(24, 8), 8, 8);
  ASSERT_EQ(windows.size(), 3u);
  EXPECT_EQ(windows[2].front(), 16);
}

TEST(StridedWindows, CorporaThatAreNoSingleStreamAreRefused) {
  EXPECT_THROW(strided_windows(stream(24, 4), 10, 4), oscar::Error);
  EXPECT_THROW(strided_windows(stream(11, 4), 12, 4), oscar::Error);
  EXPECT_THROW(strided_windows(stream(24, 4, "ids_2d"), 8, 4), oscar::Error);
  auto two = stream(24, 4);
  two.record.sources.push_back(two.record.sources.front());
  EXPECT_THROW(strided_windows(two, 8, 4), oscar::Error);
}

}  // namespace

// Scores from logits against the definition in float64.

namespace {

TEST(TokenScores, EqualTheDefinitionInFloat64) {
  torch::manual_seed(5);
  const auto reference = 6 * torch::randn({40, 3000});
  const auto logits = reference + 0.7 * torch::randn({40, 3000});
  const auto targets = torch::randint(0, 3000, {40}, torch::kInt64);
  oscar::TokenScores scores;
  score_logits(reference, logits, targets, scores);
  const auto p = reference.to(torch::kFloat64).log_softmax(-1);
  const auto q = logits.to(torch::kFloat64).log_softmax(-1);
  ASSERT_EQ(scores.nll.size(), 40u);
  for (int i = 0; i < 40; ++i) {
    EXPECT_NEAR(scores.nll[i], -q[i][targets[i].item<int64_t>()].item<double>(), 1e-6);
    const double kl = (p[i].exp() * (p[i] - q[i])).sum().item<double>();
    EXPECT_NEAR(scores.kl[i], kl, 1e-6 * std::max(1.0, kl));
    EXPECT_EQ(scores.agrees[i], p[i].argmax().item<int64_t>() == q[i].argmax().item<int64_t>());
  }
}

TEST(TokenScores, EqualLogitsHaveNoDivergenceToEightDigits) {
  torch::manual_seed(6);
  const auto logits = 10 * torch::randn({20, 150000});
  oscar::TokenScores scores;
  score_logits(logits, logits.clone(), torch::zeros({20}, torch::kInt64), scores);
  for (const double kl : scores.kl) EXPECT_NEAR(kl, 0, 1e-8);
}

TEST(TokenScores, PredictionsThatAreNotFiniteAreAnErrorAndNoScore) {
  for (const float wrong : {INFINITY, -INFINITY, NAN}) {
    const auto reference = torch::zeros({3, 10}), logits = torch::zeros({3, 10});
    logits[1] = wrong;
    oscar::TokenScores scores;
    try {
      score_logits(reference, logits, torch::zeros({3}, torch::kInt64), scores);
      ADD_FAILURE() << "scored";
    } catch (const oscar::Error& error) {
      EXPECT_NE(std::string(error.what()).find("not finite"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("prediction 1"), std::string::npos) << error.what();
    }
  }
}

TEST(TokenScores, ACollapsedMethodHasAFiniteScore) {
  auto reference = torch::zeros({1, 10}), logits = torch::zeros({1, 10});
  reference[0][3] = 120.0f;
  logits[0][4] = 150.0f;
  oscar::TokenScores scores;
  score_logits(reference, logits, torch::full({1}, 3, torch::kInt64), scores);
  EXPECT_NEAR(scores.kl[0], 150, 1e-3);
  EXPECT_NEAR(scores.nll[0], 150, 1e-3);
  EXPECT_EQ(scores.agrees[0], 0);
}

}  // namespace
