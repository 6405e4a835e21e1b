#include "oscar/calibrate/search/candidates.h"

#include <gtest/gtest.h>
#include <algorithm>

#include "calibrate/search/layer_search_case.h"

// Codecs put together on the device equal those of a composed transform.

namespace {

using namespace oscar;
using namespace oscar::search_case;

void expect_equal(const torch::Tensor& found, const torch::Tensor& expected, const char* what) {
  ASSERT_EQ(found.defined(), expected.defined()) << what;
  if (found.defined()) {
    EXPECT_TRUE(torch::equal(found, expected)) << what;
  }
}

void expect_equal(const SideCodec& found, const SideCodec& expected) {
  expect_equal(found.forward, expected.forward, "forward");
  expect_equal(found.partner, expected.partner, "partner");
  expect_equal(found.mean, expected.mean, "mean");
  expect_equal(found.centers, expected.centers, "centers");
  expect_equal(found.feedback, expected.feedback, "feedback");
  expect_equal(found.metric, expected.metric, "metric");
  EXPECT_EQ(found.recipe, expected.recipe);
  EXPECT_EQ(found.format, expected.format);
}

class CandidateCodecsTest : public testing::Test {
 protected:
  LayerStatistics statistics_ = statistics_of({random_sequence(1), random_sequence(2)});
  LayerTransforms balanced_ = fit_layer(statistics_,
                                        {.kind = TransformKind::kBalanced,
                                         .center = true,
                                         .rounding = Rounding::kShaped,
                                         .scale_correction = ScaleCorrection::kMetric},
                                        Rope{});
  LayerTransforms plain_ = fit_layer(statistics_, {.kind = TransformKind::kOscar}, Rope{});
  // The first head has centers, whatever they were fitted to.
  LayerTransforms with_centers_ = [this] {
    LayerTransforms fit = balanced_;
    fit.key.centers = MatrixStack<float>(fit.key.forward.count, 2, fit.key.forward.cols);
    for (int i = 0; i < 2 * fit.key.forward.cols; ++i) {
      fit.key.centers.data[static_cast<size_t>(i)] = 0.1f * static_cast<float>(i % 13 - 6);
    }
    return fit;
  }();
  const Rope rope_ = [] {
    Rope rope;
    rope.rotary_dim = 2;
    rope.inv_freq = {0.01};
    rope.max_positions = 2048;
    return rope;
  }();
  CandidateCodecs codecs_{kQuantizer, 1, rope_, torch::kCPU};
};

TEST_F(CandidateCodecsTest, EqualTheCodecOfTheComposedHeads) {
  for (const Side side : {Side::kKey, Side::kValue}) {
    const auto of = [&](const LayerTransforms& fit, int head, ScaleCorrection correction,
                        Rounding rounding) {
      return FittedHead{
          .fit = side == Side::kKey ? &fit.key : &fit.value,
          .head = head,
          .recipe = {.clip_ratio = 0.9f, .scale_correction = correction, .rounding = rounding}};
    };
    using enum ScaleCorrection;
    for (const Candidate& heads :
         {Candidate{of(plain_, 0, kNone, Rounding::kPlain), of(plain_, 1, kNone, Rounding::kPlain)},
          Candidate{of(balanced_, 1, kMetric, Rounding::kShaped),
                    of(plain_, 0, kUnbiased, Rounding::kPlain),
                    of(balanced_, 0, kNone, Rounding::kPlain)},
          Candidate{of(with_centers_, 0, kNone, Rounding::kPlain),
                    of(with_centers_, 1, kNone, Rounding::kPlain),
                    of(plain_, 0, kNone, Rounding::kPlain)}}) {
      expect_equal(codecs_.codec(heads, side), make_side_codec(compose_heads(heads, side), side,
                                                               kQuantizer, 1, rope_, torch::kCPU));
    }
  }
}

}  // namespace

// Sequences that the fit never sees: which, how many, and when none.

namespace {

using namespace oscar;

HeldBack split(const std::vector<int>& lengths) {
  std::vector<std::vector<int32_t>> sequences;
  for (const int length : lengths) sequences.emplace_back(length, 1);
  return hold_back(sequences, CacheFormat{});
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
}

TEST(HoldBack, LeavesSequencesThatHardlyReachBehindTheWindowsToTheFit) {
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
    EXPECT_NE(s.reason.find("at least 4 sequences of 448 tokens"), std::string::npos) << s.reason;
  }
}

TEST(HoldBack, EverySequenceIsInExactlyOneList) {
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
