// Shares of an evaluation that a bundle has seen, and when they are worth a warning.
#include "oscar/eval/overlap.h"

#include <gtest/gtest.h>

#include "oscar/report/cautions.h"

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
