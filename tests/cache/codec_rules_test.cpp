// The plain codecs of serving stacks: the golden row under every rule, ties, and the default.
#include "oscar/cache/codec_rules.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "oscar/cache/quantize_rows.h"

namespace {

using namespace oscar;

constexpr CodecRules kMinimum{.zero = ZeroForm::kMinimum};
const std::vector<float> kGolden = {-1.5f, .3f, .8f, 3.0f, -.5f, 1.1f, 0.0f, 2.0f};

std::vector<float> through(const CodecRules& rules, const std::vector<float>& x, int group,
                           float clip, MetadataDtype metadata) {
  const RowQuantizer q{.head_dim = static_cast<int>(x.size()),
                       .format = {.quant_group_size = group, .metadata = metadata, .rules = rules},
                       .recipe = {.clip_ratio = clip}};
  std::vector<float> out(x.size());
  EXPECT_EQ(quantize_rows(q, x.data(), 1, {.dequantized = out.data()}).status, RowStatus::kOk);
  return out;
}

TEST(CodecRules, TheGoldenRowHasTheSameLevelsByMinimumAndByZeroPoint) {
  // scale 3.5 / 3, codes 0 2 2 3 1 2 1 3.
  const std::vector<float> expected = {-1.5f,    .83333f, .83333f,  2.0f,
                                       -.33333f, .83333f, -.33333f, 2.0f};
  for (const CodecRules& rules : {CodecRules{}, kMinimum}) {
    const auto found = through(rules, kGolden, 8, .75f, MetadataDtype::kFp32);
    for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(found[i], expected[i], 1e-5) << i;
  }
}

TEST(CodecRules, CodesAndMetadataOfEveryRuleReadBackAsTheRow) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const int d = 128, rows = 64, size = 64;
  std::vector<float> x(d * rows), found(d * rows);
  for (float& value : x) value = bf16_to_float(float_to_bf16(normal(random)));
  for (int bits = 0; bits < 16; ++bits) {
    const CodecRules rules{static_cast<ClipSpan>(bits & 1), static_cast<ZeroForm>(bits >> 1 & 1),
                           static_cast<CodeTies>(bits >> 2 & 1),
                           static_cast<MetadataRounding>(bits >> 3 & 1)};
    const RowQuantizer q{.head_dim = d,
                         .format = {.quant_group_size = size, .rules = rules},
                         .recipe = {.clip_ratio = .92f}};
    std::vector<uint8_t> packed(rows * d / 4);
    std::vector<uint16_t> metadata(rows * d / size * 2);
    ASSERT_EQ(
        quantize_rows(q, x.data(), rows, {packed.data(), metadata.data(), found.data()}, 2).status,
        RowStatus::kOk);
    for (int i = 0; i < d * rows; ++i) {
      const uint16_t* pair = &metadata[i / size * 2];
      const int code = unpack_code(&packed[i / d * (d / 4)], i % d, d, q.order);
      const ScaleZero sz{fp16_to_float(pair[0]), fp16_to_float(pair[1])};
      ASSERT_EQ(dequantize(rules, code, sz), found[i]) << "rules " << bits;
    }
  }
}

TEST(CodecRules, TiesGoUpOrToTheEvenCode) {
  // Scale 2, minimum 0: 1, 3 and 5 lie half way between codes.
  const std::vector<float> x = {0, 6, 1, 3, 5, 2, 4, 0};
  const auto up = through(kMinimum, x, 8, 0, MetadataDtype::kFp32);
  EXPECT_EQ(up, (std::vector<float>{0, 6, 2, 4, 6, 2, 4, 0}));
  const auto even =
      through({.zero = ZeroForm::kMinimum, .ties = CodeTies::kEven}, x, 8, 0, MetadataDtype::kFp32);
  EXPECT_EQ(even, (std::vector<float>{0, 6, 0, 4, 4, 2, 4, 0}));
}

TEST(CodecRules, AGroupIsClippedByItselfOnlyUnderThatRule) {
  // The row's threshold (index 12 of 16) is 8; the first group's own (index 6 of 8) is 1.
  std::vector<float> x = {-1, 1, -1, 1, -1, 1, 1, 4, 8, 8, 8, 8, 8, 8, 8, -8};
  const auto by_row = through({}, x, 8, .75f, MetadataDtype::kFp32);
  EXPECT_NEAR(by_row[7], 4, 1e-6);
  const auto by_group =
      through({.clip_span = ClipSpan::kQuantGroup}, x, 8, .75f, MetadataDtype::kFp32);
  EXPECT_NEAR(by_group[7], 1, 1e-6);
  EXPECT_NEAR(by_group[8], 8, 1e-5);
}

TEST(CodecRules, CodesAreFoundBeforeOrAfterMetadataIsRounded) {
  // The minimum 0.10001 is 0.100037 in fp16; the second value is .2 / 3 / 2 over .1000236, a tie
  // that its rounding decides.
  const float lo = 0.10001f, scale = (0.3f - lo) / 3.0f;
  const float x1 = lo + 0.5f * scale + 1e-5f;  // code 1 by the exact minimum, 0 by the rounded one
  const std::vector<float> x = {lo, x1, 0.3f, 0.3f, 0.3f, 0.3f, 0.3f, 0.3f};
  const auto before = through(kMinimum, x, 8, 0, MetadataDtype::kFp16);
  const auto after =
      through({.zero = ZeroForm::kMinimum, .metadata_rounding = MetadataRounding::kAfterCoding}, x,
              8, 0, MetadataDtype::kFp16);
  EXPECT_EQ(before[1], before[0]);
  EXPECT_GT(after[1], after[0]);
  EXPECT_EQ(after[0], before[0]);  // stored values are the same
}

TEST(CodecRules, ConstantAndZeroRowsComeBack) {
  for (const ZeroForm zero : {ZeroForm::kCodeUnits, ZeroForm::kMinimum}) {
    for (const MetadataRounding rounding :
         {MetadataRounding::kBeforeCoding, MetadataRounding::kAfterCoding}) {
      const CodecRules rules{.zero = zero, .metadata_rounding = rounding};
      for (const float value : {0.0f, 2.5f, -0.75f}) {
        const auto found =
            through(rules, std::vector<float>(8, value), 8, .96f, MetadataDtype::kFp16);
        for (const float x : found) EXPECT_NEAR(x, value, 2e-3 * std::abs(value)) << value;
      }
    }
  }
}

TEST(CodecRules, WhatCanNotBeWrittenIsReportedWithItsRow) {
  const RowQuantizer q{.head_dim = 8, .format = {.quant_group_size = 8, .rules = kMinimum}};
  std::vector<float> x(24, 1.0f), out(24);
  x[17] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(quantize_rows(q, x.data(), 3, {.dequantized = out.data()}).status,
            RowStatus::kNonFinite);
  x[17] = 1e6f;  // the scale is infinite in fp16
  const RowsStatus status = quantize_rows(q, x.data(), 3, {.dequantized = out.data()});
  EXPECT_EQ(status.status, RowStatus::kMetadataOverflow);
  EXPECT_EQ(status.row, 2);
}

template <typename Rule>
void expect_names(std::initializer_list<Rule> rules) {
  for (const Rule rule : rules) {
    Rule read{};
    EXPECT_TRUE(parse_codec_word(codec_word(rule), read));
    EXPECT_EQ(read, rule);
    EXPECT_FALSE(parse_codec_word("neither", read));
  }
}

TEST(CodecRules, NamesComeBack) {
  expect_names({ClipSpan::kHeadRow, ClipSpan::kQuantGroup});
  expect_names({ZeroForm::kCodeUnits, ZeroForm::kMinimum});
  expect_names({CodeTies::kUp, CodeTies::kEven});
  expect_names({MetadataRounding::kBeforeCoding, MetadataRounding::kAfterCoding});
}

}  // namespace
