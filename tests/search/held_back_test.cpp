// Chunks that the fit never sees: which, how many, and when none.
#include "oscar/search/held_back.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace {

using namespace oscar;

HeldBack split(const std::vector<int>& lengths, bool full = false) {
  std::vector<std::vector<int32_t>> chunks;
  for (const int length : lengths) chunks.emplace_back(length, 1);
  return hold_back(chunks, QuantizerSettings{}, full);
}

using Indices = std::vector<size_t>;

TEST(HoldBack, TakesTheLastQuarterInTurnsTheLastToConfirmation) {
  const HeldBack s = split(std::vector<int>(17, 4096));
  EXPECT_EQ(s.search, (Indices{13, 15}));
  EXPECT_EQ(s.confirm, (Indices{14, 16}));
  EXPECT_EQ(s.fit.size(), 13u);
  EXPECT_EQ(s.fit.back(), 12u);
  EXPECT_EQ(s.reason, "");
}

TEST(HoldBack, TakesTwoOfFourAndNeverMoreThanTheCap) {
  const HeldBack few = split({512, 512, 512, 512});
  EXPECT_EQ(few.search, Indices{2});
  EXPECT_EQ(few.confirm, Indices{3});
  const HeldBack many = split(std::vector<int>(100, 512));
  EXPECT_EQ(many.search.size() + many.confirm.size(), static_cast<size_t>(kMostHeldBack));
  const HeldBack more = split(std::vector<int>(100, 512), true);
  EXPECT_EQ(more.search.size() + more.confirm.size(), static_cast<size_t>(kMostHeldBackFull));
}

TEST(HoldBack, LeavesChunksThatHardlyReachBehindTheWindowsToTheFit) {
  const HeldBack s = split({448, 448, 448, 448, 448, 447, 20});
  EXPECT_EQ(s.search, Indices{3});
  EXPECT_EQ(s.confirm, Indices{4});
  EXPECT_EQ(s.fit, (Indices{0, 1, 2, 5, 6}));
}

TEST(HoldBack, SaysWhyASmallCorpusHoldsNothingBack) {
  for (const auto& lengths : {std::vector<int>{4096, 4096, 4096}, std::vector<int>(50, 400)}) {
    const HeldBack s = split(lengths);
    EXPECT_TRUE(s.search.empty() && s.confirm.empty());
    EXPECT_EQ(s.fit.size(), lengths.size());
    EXPECT_NE(s.reason.find("at least 4 chunks of 448 tokens"), std::string::npos) << s.reason;
  }
}

TEST(HoldBack, EveryChunkIsInExactlyOneList) {
  for (int n = 1; n < 70; ++n) {
    const HeldBack s = split(std::vector<int>(n, 600));
    Indices all = s.fit;
    all.insert(all.end(), s.search.begin(), s.search.end());
    all.insert(all.end(), s.confirm.begin(), s.confirm.end());
    std::sort(all.begin(), all.end());
    ASSERT_EQ(all.size(), static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) ASSERT_EQ(all[i], static_cast<size_t>(i));
    EXPECT_LE(s.search.size(), s.confirm.size());
  }
}

}  // namespace
