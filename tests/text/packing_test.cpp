// Separators put into token sequences.
#include "oscar/text/packing.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <numeric>

namespace oscar {
namespace {

TEST(Separators, AreTheEndsThatTheCheckpointAndItsTokenizerName) {
  const std::vector<AddedToken> added = {{.content = "<|im_end|>", .id = 12},
                                         {.content = "<tool>", .id = 13},
                                         {.content = "</s>", .id = 2},
                                         {.content = "<eos>", .id = 30}};
  EXPECT_EQ(separator_tokens({7}, added, 20), (std::vector<int32_t>{7, 2, 12}));
  EXPECT_EQ(separator_tokens({12, 12}, added, 20), (std::vector<int32_t>{12, 2}));
  EXPECT_EQ(separator_tokens({7, 7}, {}, 20), std::vector<int32_t>{7});
  EXPECT_TRUE(separator_tokens({9000}, {}, 20).empty());
}

TEST(Separators, TakeThePlaceOfEveryGapthToken) {
  const auto changed = with_separators({{0, 1, 2, 3, 4, 5, 6}, {0, 1}}, {91, 92}, 2);
  EXPECT_EQ(changed[0], (std::vector<int32_t>{0, 1, 91, 3, 92, 5, 91}));
  EXPECT_EQ(changed[1], (std::vector<int32_t>{0, 1}));
}

TEST(Separators, AreRareBelowOneInTheLimit) {
  std::vector<std::vector<int32_t>> text(2, std::vector<int32_t>(kTokensOfASeparator, 5));
  EXPECT_TRUE(is_rare(text, {91}));
  text[0][3] = 91;
  EXPECT_TRUE(is_rare(text, {91, 92}));
  text[1][7] = 92;
  EXPECT_FALSE(is_rare(text, {91, 92}));
}

// Sequences of `length` tokens that differ, then `padding` of id 7 behind them or before.
TokenSequences padded(int32_t length, size_t padding, bool before, const char* kind) {
  TokenSequences corpus;
  for (int row = 0; row < 4; ++row) {
    std::vector<int32_t> ids(static_cast<size_t>(length));
    for (int32_t i = 0; i < length; ++i) ids[static_cast<size_t>(i)] = 10 + i;
    ids.insert(before ? ids.begin() : ids.end(), padding, 7);
    corpus.sequences.push_back(std::move(ids));
  }
  corpus.record.sources.push_back({.name = "ids.npy", .kind = kind});
  return corpus;
}

TEST(Padding, IsNamedByItsIdAndShareWhereItIsMoreThanALittle) {
  for (const bool before : {false, true}) {
    const std::string said = padding_warning(padded(300, 100, before, "ids_2d"));
    EXPECT_NE(said.find("25% of the corpus is token 7 in runs of 32 or more"), std::string::npos)
        << said;
  }
  EXPECT_NE(padding_warning(padded(600, 32, false, "ids_1d")), "");  // 5.06%
  EXPECT_EQ(padding_warning(padded(608, 32, false, "ids_1d")), "");  // 5%
  EXPECT_EQ(padding_warning(padded(300, 31, false, "ids_2d")), "");  // no long runs
  EXPECT_EQ(padding_warning(padded(300, 0, false, "ids_2d")), "");
  EXPECT_EQ(padding_warning(padded(300, 100, false, "self")), "");  // a model that repeats itself
  EXPECT_EQ(padding_warning({}), "");
}

TEST(Recall, RepeatsStretchesOfTheFirstHalfInEverySecondSequence) {
  std::vector<std::vector<int32_t>> text;
  for (const int64_t length : {1024, 1023, 1024, 512, 95, 95}) {
    std::vector<int32_t> ids(static_cast<size_t>(length));
    std::iota(ids.begin(), ids.end(), 0);
    text.push_back(ids);
  }
  const auto before = text;
  const std::string words = repeat_stretches(text, 3);
  for (const size_t whole : {0, 2, 4, 5}) EXPECT_EQ(text[whole], before[whole]);  // 95: too short
  EXPECT_NE(words.find(", 767 tokens in all"), std::string::npos) << words;       // 511 + 256
  for (const size_t s : {1, 3}) {
    const std::vector<int32_t>& ids = text[s];
    const size_t half = ids.size() - ids.size() / 2;
    EXPECT_TRUE(std::equal(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(half),
                           before[s].begin()));
    std::vector<int64_t> stretches;
    for (size_t i = half; i < ids.size(); ++i) {
      EXPECT_LT(static_cast<size_t>(ids[i]), half);  // ids count the tokens of the sequence
      if (i == half || ids[i] != ids[i - 1] + 1) stretches.push_back(0);
      ++stretches.back();
    }
    const auto last = stretches.back();
    stretches.pop_back();  // cut short by the sequence's end
    EXPECT_LE(last, kLongestStretch);
    EXPECT_GE(*std::ranges::min_element(stretches), kShortestStretch);
    EXPECT_LE(*std::ranges::max_element(stretches), kLongestStretch);
    EXPECT_GT(*std::ranges::max_element(stretches), 2 * *std::ranges::min_element(stretches));
  }
  auto again = before, other = before;
  repeat_stretches(again, 3);
  repeat_stretches(other, 4);
  EXPECT_EQ(again, text);
  EXPECT_NE(other, text);
  std::vector<std::vector<int32_t>> one = {before[0]};
  EXPECT_EQ(repeat_stretches(one, 3), "");
}

TEST(Separators, AreSprinkledOverEverySecondSequence) {
  std::vector<std::vector<int32_t>> text(4, std::vector<int32_t>(20000, 5));
  const auto before = text;
  const std::string words = sprinkle_separators(text, {91, 92}, 3);
  EXPECT_EQ(text[0], before[0]);
  EXPECT_EQ(text[2], before[2]);
  EXPECT_NE(text[1], text[3]);
  std::vector<size_t> places;
  for (size_t i = 0; i < text[1].size(); ++i) {
    if (text[1][i] != 5) places.push_back(i);
  }
  size_t shortest = places[0], longest = places[0];
  for (size_t i = 1; i < places.size(); ++i) {
    shortest = std::min(shortest, places[i] - places[i - 1]);
    longest = std::max(longest, places[i] - places[i - 1]);
    EXPECT_NE(text[1][places[i]], text[1][places[i - 1]]);  // in turn
  }
  EXPECT_GE(shortest, 64u);
  EXPECT_LE(longest, 512u);
  EXPECT_GT(longest, 2 * shortest);
  const auto in_all = 40000 - std::count(text[1].begin(), text[1].end(), 5) -
                      std::count(text[3].begin(), text[3].end(), 5);
  EXPECT_NE(words.find("ids 91, 92 "), std::string::npos) << words;
  EXPECT_NE(words.find(", " + std::to_string(in_all) + " in all"), std::string::npos) << words;
  auto again = before;
  sprinkle_separators(again, {91, 92}, 3);
  EXPECT_EQ(again, text);
}

}  // namespace
}  // namespace oscar
