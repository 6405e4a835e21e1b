#include "oscar/eval/report_json.h"

#include <gtest/gtest.h>
#include <cmath>
#include <optional>
#include <string>

#include "oscar/eval/estimate.h"
#include "oscar/eval/evaluate.h"

// The report and its table, from scores made by hand.

namespace oscar {
namespace {

// bf16, a method, and the one that others are compared with.
std::vector<Method> three_methods() {
  std::vector<Method> methods(3);
  const char* const names[] = {"bf16", "identity", "bundle"};
  for (size_t m = 0; m < methods.size(); ++m) {
    methods[m].name = names[m];
    methods[m].reference = m == 0;
    methods[m].layers.resize(1);
  }
  return methods;
}

// Scores of `sequences` of so many predicted tokens; method m loses m tenths of a nat.
Json report_of(int64_t sequences, int64_t tokens, bool one_text = false,
               std::optional<size_t> judged = 2, double copies = 0) {
  TextResults results{.first_position = 1,
                      .longest = tokens + 1,
                      .measured = std::vector<int64_t>(static_cast<size_t>(sequences), tokens),
                      .one_text = one_text,
                      .repeated_share = copies,
                      .scores = std::vector<TokenScores>(3),
                      .output_errors = std::vector<OutputError>(3)};
  for (size_t m = 0; m < 3; ++m) {
    const double loss = 0.1 * static_cast<double>(m);
    for (int64_t i = 0; i < sequences * tokens; ++i) {
      const double wave = 0.01 * static_cast<double>(i % 7);
      results.scores[m].nll.push_back(2 + loss * (1 + wave));
      results.scores[m].kl.push_back(loss * (1 + wave));
      results.scores[m].agrees.push_back(1);
    }
  }
  Json report = {{"mode", "decode"}, {"position_offset", 0}};
  describe_methods(three_methods(), report);
  add_text_results(results, three_methods(), judged, /*seed=*/0, report);
  return report;
}

TEST(ReportJson, FewUnitsHaveNoIntervalOfAPairedDifference) {
  const Json report = Json::parse(report_of(2, 700).dump());
  ASSERT_EQ(report["resampling_units"], 4);
  const Json& increase = report["methods"]["identity"]["nll_increase"];
  EXPECT_TRUE(increase["low"].is_null() && increase["high"].is_null()) << increase;
  EXPECT_NEAR(increase["mean"], 0.1, 0.01);
  const Json& difference = report["methods"]["identity"]["kl_difference"];
  EXPECT_TRUE(difference["low"].is_null() && difference["high"].is_null()) << difference;
}

TEST(ReportJson, EveryMethodIsSetAgainstTheJudgedOneWhereverItStands) {
  for (const size_t judged : {1, 2}) {
    const Json report = report_of(12, 120, false, judged);
    const char* const names[] = {"bf16", "identity", "bundle"};
    const Json& other = report["methods"][names[3 - judged]];
    EXPECT_EQ(other["kl_difference"]["against"], names[judged]);
    EXPECT_NEAR(other["kl_difference"]["mean"], judged == 1 ? 0.1 : -0.1, 0.01);
    EXPECT_FALSE(report["methods"][names[judged]].contains("kl_difference"));
    EXPECT_FALSE(report["methods"]["bf16"].contains("kl_difference"));
  }
  EXPECT_EQ(report_of(12, 120, false, {}).dump().find("kl_difference"), std::string::npos);
}

TEST(ReportJson, CopiesAreNoUnits) {
  const auto report = [](double copies) { return report_of(16, 120, false, 2, copies); };
  const auto interval_of = [](const Json& found) {
    return found["methods"]["identity"]["nll_increase"]["low"];
  };
  EXPECT_TRUE(std::isfinite(interval_of(report(0.5)).get<double>()));
  const Json found = report(0.6);  // 6 of 16 sequences
  EXPECT_TRUE(std::isnan(interval_of(found).get<double>()));
  EXPECT_TRUE(std::isnan(found["methods"]["identity"]["kl_difference"]["high"].get<double>()));
  const std::string table = format_table(found);
  EXPECT_NE(table.find("60% of the evaluation's text repeats itself"), std::string::npos) << table;
  EXPECT_NE(table.find("1,920 tokens with copies"), std::string::npos) << table;
  EXPECT_EQ(table.find("predicts nothing"), std::string::npos) << table;
  EXPECT_EQ(format_table(report(0.2)).find("repeats itself"), std::string::npos);
}

TEST(ReportJson, TheTableOfOneUnitShowsNoIntervalInMemoryAndThroughAFile) {
  const Json report = report_of(1, 120);
  const std::string table = format_table(report);
  EXPECT_EQ(table.find('['), std::string::npos) << table;
  EXPECT_NE(table.find("CAUTION: the evaluation counts 120 tokens"), std::string::npos) << table;
  EXPECT_EQ(table.find("nan"), std::string::npos) << table;
  EXPECT_NE(table.find("perplexity over bf16's  paired"), std::string::npos) << table;
  EXPECT_EQ(table, format_table(Json::parse(report.dump())));
}

TEST(ReportJson, WindowsThatContinueEachOtherAreNoUnits) {
  EXPECT_EQ(report_of(12, 128)["resampling_units"], 12);
  EXPECT_EQ(report_of(12, 128, /*one_text=*/true)["resampling_units"], 12 * 128 / kUnitTokens);
}

TEST(ReportJson, TheTableOfSeveralUnitsShowsTheirInterval) {
  const Json report = report_of(9, 120);
  EXPECT_TRUE(report["methods"]["identity"]["nll_increase"]["low"].is_number());
  const std::string table = format_table(report);
  EXPECT_NE(table.find("paired, 95% interval"), std::string::npos) << table;
  EXPECT_NE(table.find('['), std::string::npos) << table;
}

}  // namespace
}  // namespace oscar
