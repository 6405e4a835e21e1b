#include "oscar/cache/codec.h"

#include <gtest/gtest.h>
#include <cmath>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>
#include <vector>

#include "cache/codec_ref.h"
#include "oscar/cache/quantize_rows.h"

// Code thresholds against the codec's own arithmetic, at and around every place where they matter.

namespace {

using oscar::MetadataDtype;
using oscar::ScaleZero;

// What rows lead to, and then some: clipped and constant rows, zeros at and beside half codes.
std::vector<ScaleZero> scales_and_zeros(int random) {
  std::mt19937 rng(11);
  std::normal_distribution<float> normal;
  std::vector<ScaleZero> all;
  for (const MetadataDtype dtype :
       {MetadataDtype::kFp16, MetadataDtype::kBf16, MetadataDtype::kFp32}) {
    for (int i = 0; i < random; ++i) {
      const float middle = i % 3 ? normal(rng) : 0.0f, size = std::exp(3.0f * normal(rng));
      const float half = std::fabs(normal(rng));
      all.push_back(oscar::scale_and_zero({.metadata = dtype}, size * (middle - half),
                                          size * (middle + half)));
    }
    for (const float zero : {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 2.5f, 3.0f, 0.24999999f, 0.40000001f,
                             -0.5f, 1024.0f, -1024.0f, 5.9604645e-8f, -7.25f}) {
      for (const float scale : {1.0f, 0.33325195f, 6.1035156e-5f, 3.3333333e-9f, 3.0e4f, 0.7f}) {
        const ScaleZero exact{round_to_metadata(scale, dtype), round_to_metadata(zero, dtype)};
        if (!(exact.scale > 0.0f) || !oscar::is_finite(exact.scale)) continue;
        all.push_back(exact);
        for (const float beside : {oscar::float_from_bits(oscar::float_bits(exact.zero) + 1),
                                   oscar::float_from_bits(oscar::float_bits(exact.zero) - 1)}) {
          if (exact.zero != 0.0f) all.push_back({exact.scale, beside});
        }
      }
    }
    for (const float x : {0.0f, 100.0f, -100.0f, 3.0e38f, -3.0e38f, 1.0e-30f}) {
      all.push_back(oscar::scale_and_zero({.metadata = dtype}, x, x));
    }
  }
  all.push_back({3.3333333e-9f, 3.0e10f});
  all.push_back({3.3333333e-9f, -12345679.0f});
  return all;
}

TEST(CodeThresholds, AreTheFirstValueOfTheirCode) {
  int finite = 0;
  for (const ScaleZero sz : scales_and_zeros(20000)) {
    if (!oscar::is_finite(sz.scale) || !oscar::is_finite(sz.zero)) continue;
    for (int k = 1; k <= 3; ++k) {
      const float t = oscar::code_threshold(k, sz);
      if (std::isinf(t)) {
        EXPECT_LT(code_of(3.4028235e38f, sz), k);
        continue;
      }
      ++finite;
      ASSERT_GE(code_of(t, sz), k) << "scale " << sz.scale << " zero " << sz.zero;
      if (t > -3.4028235e38f) {
        ASSERT_LT(code_of(oscar::float_below(t), sz), k)
            << "scale " << sz.scale << " zero " << sz.zero << " threshold " << t;
      }
    }
  }
  EXPECT_GT(finite, 100000);
}

TEST(CodeThresholds, InBf16GiveTheCodeOfEveryFiniteBf16) {
  for (const ScaleZero sz : scales_and_zeros(40)) {
    if (!oscar::is_finite(sz.scale) || !oscar::is_finite(sz.zero)) continue;
    float bound[3];
    for (int k = 1; k <= 3; ++k) {
      const uint32_t bits = oscar::bf16_from_below(oscar::code_threshold(k, sz));
      bound[k - 1] = oscar::bf16_to_float(static_cast<uint16_t>(bits));
    }
    for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
      const float x = oscar::bf16_to_float(static_cast<uint16_t>(bits));
      if (!oscar::is_finite(x)) continue;
      const int code = (x >= bound[0]) + (x >= bound[1]) + (x >= bound[2]);
      ASSERT_EQ(code, code_of(x, sz)) << "x " << x << " scale " << sz.scale << " zero " << sz.zero;
    }
  }
}

}  // namespace

// The plain codecs of backends: the golden row under every rule, ties, and the default.

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

// The row codec against hand-checked rows, independent goldens and its own properties.

namespace {

using oscar::MetadataDtype;
using oscar::PackOrder;
using oscar::Rounding;
using oscar::RowQuantizer;
using oscar::RowStatus;
using oscar::ScaleCorrection;

struct Encoded {
  std::vector<uint8_t> packed;
  std::vector<uint8_t> metadata;
  std::vector<float> dequantized;
  oscar::RowsStatus status;
  bool operator==(const Encoded& other) const {
    return packed == other.packed && metadata == other.metadata && dequantized == other.dequantized;
  }
};

Encoded encode(const RowQuantizer& q, const std::vector<float>& x, bool fast, int threads = 1) {
  const int64_t rows = static_cast<int64_t>(x.size()) / q.head_dim;
  Encoded out;
  out.packed.resize(rows * q.head_dim / 4);
  out.metadata.resize(rows * (q.head_dim / q.format.quant_group_size) * 2 *
                      metadata_bytes(q.format.metadata));
  out.dequantized.resize(x.size());
  const oscar::QuantizedRows to{out.packed.data(), out.metadata.data(), out.dequantized.data()};
  out.status = fast ? quantize_rows(q, x.data(), rows, to, threads)
                    : quantize_rows_ref(q, x.data(), rows, to);
  return out;
}

std::string hex(const std::vector<uint8_t>& bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    char two[3];
    snprintf(two, sizeof(two), "%02x", byte);
    text += two;
  }
  return text;
}

// As tests/golden/make_goldens.py writes them.
std::vector<float> golden_feedback(int d) {
  std::vector<float> u(d * d, 0.0f);
  for (int j = 0; j < d; ++j) {
    u[j * d + j] = 1.0f;
    for (int i = j + 1; i < d; ++i) u[j * d + i] = ((7 * j + 13 * i) % 33 - 16) / 256.0f;
  }
  return u;
}
std::vector<float> golden_metric(int d) {
  std::vector<float> m(d * d);
  for (int j = 0; j < d; ++j) {
    for (int i = 0; i < d; ++i) {
      m[j * d + i] = (i == j ? 2.0f : 0.0f) + ((5 * (i + j)) % 9 - 4) / 64.0f;
    }
  }
  return m;
}

const std::vector<float> kGoldenRow = {-1.5f, .3f, .8f, 3.0f, -.5f, 1.1f, 0.0f, 2.0f};

TEST(Codec, GoldenRowOfEightMatchesTheHandComputedBytes) {
  RowQuantizer q{.head_dim = 8,
                 .format = {.quant_group_size = 8, .metadata = MetadataDtype::kFp32},
                 .recipe = {.clip_ratio = 0.75f}};
  const Encoded row = encode(q, kGoldenRow, false);
  EXPECT_EQ(hex(row.packed), "e8d9");
  float pair[2];
  memcpy(pair, row.metadata.data(), sizeof(pair));
  EXPECT_FLOAT_EQ(pair[0], 1.1666667f);
  EXPECT_FLOAT_EQ(pair[1], 1.2857143f);
  const float expected[8] = {-1.5f, .83333f, .83333f, 2.0f, -.33333f, .83333f, -.33333f, 2.0f};
  for (int i = 0; i < 8; ++i) EXPECT_NEAR(row.dequantized[i], expected[i], 1e-5);
  q.order = PackOrder::kQuartered;
  EXPECT_EQ(hex(encode(q, kGoldenRow, false).packed), "58ee");
}

TEST(Codec, GoldenRowShapedAndMetricCorrectedMatchesTheHandComputedBytes) {
  std::vector<double> m(64);
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) m[i * 8 + j] = (i == j ? 1.0 : 0.0) + (8 - i) * (8 - j);
  }
  const std::vector<double> u = oscar_test::feedback_ref(m, 8, 0.01);
  const std::vector<float> feedback(u.begin(), u.end()), metric(m.begin(), m.end());
  std::vector<float> x = kGoldenRow;
  for (float& value : x) value = oscar::bf16_to_float(oscar::float_to_bf16(value));
  RowQuantizer q{.head_dim = 8,
                 .format = {.quant_group_size = 8},
                 .recipe = {.clip_ratio = 0.75f, .rounding = Rounding::kShaped},
                 .feedback = feedback.data(),
                 .metric = metric.data()};
  for (const bool fast : {false, true}) {
    q.recipe.scale_correction = ScaleCorrection::kNone;
    const Encoded shaped = encode(q, x, fast);
    EXPECT_EQ(hex(shaped.packed), "e8e9");
    EXPECT_EQ(hex(shaped.metadata), "ab3c243d");  // scale 0x3cab, zero 0x3d24
    q.recipe.scale_correction = ScaleCorrection::kMetric;
    const Encoded corrected = encode(q, x, fast);
    EXPECT_EQ(hex(corrected.packed), "e8e9");
    EXPECT_EQ(hex(corrected.metadata), "983c243d");
  }
}

TEST(Codec, ThresholdIndexIsTheFloorOfAnFp32Product) {
  EXPECT_EQ(oscar::clip_threshold_index(.96f, 128), 122);
  EXPECT_EQ(oscar::clip_threshold_index(.92f, 128), 117);
  EXPECT_EQ(oscar::clip_threshold_index(1.0f, 128), 127);
  EXPECT_EQ(oscar::clip_threshold_index(0.0f, 128), -1);
  EXPECT_EQ(oscar::clip_threshold_index(-1.0f, 128), -1);
}

class CodecGoldens : public testing::TestWithParam<int> {};

TEST_P(CodecGoldens, BothVersionsWriteTheBytesOfTheIndependentGenerator) {
  const int d = GetParam();
  const std::string path =
      std::string(OSCAR_SOURCE_DIR) + "/tests/golden/codec_d" + std::to_string(d) + ".txt";
  std::ifstream file(path);
  ASSERT_TRUE(file) << path;
  const std::vector<float> feedback = golden_feedback(d), metric = golden_metric(d);
  std::string word, name, dtype, order, rounding, correction, bits, codes, metadata;
  int cases = 0;
  RowQuantizer q;
  while (file >> word >> name >> q.head_dim >> q.format.quant_group_size >> q.recipe.clip_ratio >>
         dtype >> order >> rounding >> correction >> bits >> codes >> metadata) {
    SCOPED_TRACE(name + " " + dtype + " " + rounding + " " + correction);
    ASSERT_TRUE(oscar::parse_codec_word(dtype, q.format.metadata));
    q.order = order == "quartered" ? PackOrder::kQuartered : PackOrder::kConsecutive;
    q.recipe.rounding = rounding == "shaped" ? Rounding::kShaped : Rounding::kPlain;
    q.feedback = feedback.data();
    q.metric = metric.data();
    q.recipe.scale_correction = correction == "metric"     ? ScaleCorrection::kMetric
                                : correction == "unbiased" ? ScaleCorrection::kUnbiased
                                                           : ScaleCorrection::kNone;
    std::vector<float> x(d);
    for (int i = 0; i < d; ++i) {
      x[i] = oscar::bf16_to_float(
          static_cast<uint16_t>(std::stoul(bits.substr(4 * i, 4), nullptr, 16)));
    }
    for (const bool fast : {false, true}) {
      const Encoded row = encode(q, x, fast);
      ASSERT_EQ(row.status.status, RowStatus::kOk);
      EXPECT_EQ(hex(row.packed), codes);
      const int width = metadata_bytes(q.format.metadata);
      std::string big_endian;
      for (size_t at = 0; at < row.metadata.size(); at += width) {
        std::vector<uint8_t> one(row.metadata.begin() + at, row.metadata.begin() + at + width);
        big_endian += hex({one.rbegin(), one.rend()});
      }
      EXPECT_EQ(big_endian, metadata);
    }
    ++cases;
  }
  EXPECT_EQ(cases, 65);
}
INSTANTIATE_TEST_SUITE_P(HeadDims, CodecGoldens, testing::Values(64, 128, 256));

TEST(Codec, EveryByteSurvivesUnpackingAndPackingInBothOrders) {
  for (const PackOrder order : {PackOrder::kConsecutive, PackOrder::kQuartered}) {
    for (int base = 0; base < 256; base += 16) {
      uint8_t packed[16], codes[64], again[16];
      for (int i = 0; i < 16; ++i) packed[i] = static_cast<uint8_t>(base + i);
      oscar::unpack_row(packed, 64, order, codes);
      for (const uint8_t code : codes) ASSERT_LE(code, 3);
      oscar::pack_row(codes, 64, order, again);
      ASSERT_EQ(memcmp(packed, again, 16), 0);
    }
  }
}

TEST(Codec, ErrorOfUnclippedRowsIsAtMostHalfAStep) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal(0.3f, 2.0f);
  std::vector<float> x(128 * 64);
  for (float& value : x) value = normal(rng);
  const RowQuantizer q{.head_dim = 128,
                       .format = {.quant_group_size = 64, .metadata = MetadataDtype::kFp32}};
  const Encoded rows = encode(q, x, true);
  for (size_t i = 0; i < x.size(); ++i) {
    float scale;
    memcpy(&scale, rows.metadata.data() + i / 64 * 8, 4);
    ASSERT_LE(std::fabs(rows.dequantized[i] - x[i]), scale * 0.5001f);
  }
}

TEST(Codec, ValuesThatAreNotFiniteAreRefusedAndTheirRowIsNamed) {
  const RowQuantizer q{.head_dim = 64, .format = {.quant_group_size = 64}};
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    std::vector<float> x(64 * 200, 1.0f);
    x[64 * 77 + 13] = bad;
    for (const bool fast : {false, true}) {
      const Encoded rows = encode(q, x, fast, 2);
      EXPECT_EQ(rows.status.status, RowStatus::kNonFinite);
      EXPECT_EQ(rows.status.row, 77);
    }
  }
}

TEST(Codec, RangesBeyondTheMetadataDtypeAreRefusedNotStoredAsInfinity) {
  std::vector<float> x(64, -3e5f);
  x[3] = 3e5f;
  RowQuantizer q{.head_dim = 64, .format = {.quant_group_size = 64}};
  EXPECT_EQ(encode(q, x, true).status.status, RowStatus::kMetadataOverflow);
  q.format.metadata = MetadataDtype::kBf16;
  EXPECT_EQ(encode(q, x, true).status.status, RowStatus::kOk);
}

struct Sweep {
  int head_dim, quant_group_size;
  MetadataDtype metadata;
  ScaleCorrection correction;
  bool shaped;
};
void PrintTo(const Sweep& sweep, std::ostream* out) {
  *out << "d " << sweep.head_dim << ", group " << sweep.quant_group_size << ", metadata "
       << static_cast<int>(sweep.metadata) << ", correction " << static_cast<int>(sweep.correction)
       << (sweep.shaped ? ", shaped" : ", plain");
}
class CodecSweep : public testing::TestWithParam<Sweep> {};

TEST_P(CodecSweep, FastRowsEqualThePlainVersionByteForByte) {
  const Sweep p = GetParam();
  const int d = p.head_dim, rows = 1003;  // leaves idle lanes
  std::mt19937 rng(11);
  std::normal_distribution<float> normal;
  std::vector<float> x(d * rows);
  for (int r = 0; r < rows; ++r) {
    const float scale = std::exp(3.0f * normal(rng)), shift = 2.0f * normal(rng);
    for (int i = 0; i < d; ++i) {
      x[r * d + i] = oscar::bf16_to_float(oscar::float_to_bf16(scale * (normal(rng) + shift)));
    }
  }
  const std::vector<float> feedback = golden_feedback(d), metric = golden_metric(d);
  const RowQuantizer q{.head_dim = d,
                       .format = {.quant_group_size = p.quant_group_size, .metadata = p.metadata},
                       .recipe = {.clip_ratio = .95f,
                                  .scale_correction = p.correction,
                                  .rounding = p.shaped ? Rounding::kShaped : Rounding::kPlain},
                       .feedback = feedback.data(),
                       .metric = metric.data()};
  EXPECT_TRUE(encode(q, x, false) == encode(q, x, true, 1));
  EXPECT_TRUE(encode(q, x, false) == encode(q, x, true, 3));
}
INSTANTIATE_TEST_SUITE_P(
    Settings, CodecSweep,
    testing::Values(Sweep{64, 64, MetadataDtype::kFp16, ScaleCorrection::kNone, false},
                    Sweep{128, 128, MetadataDtype::kFp16, ScaleCorrection::kMetric, true},
                    Sweep{128, 64, MetadataDtype::kFp32, ScaleCorrection::kUnbiased, false},
                    Sweep{256, 128, MetadataDtype::kBf16, ScaleCorrection::kMetric, true},
                    Sweep{256, 64, MetadataDtype::kFp16, ScaleCorrection::kNone, true}));

TEST(ShapedRounding, LowersTheMetricLossOfPlainRounding) {
  const int d = 128, rows = 256;
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  std::vector<double> factor(d * 16), m(d * d, 0.0);
  for (double& value : factor) value = normal(rng);
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) {
      for (int k = 0; k < 16; ++k) m[i * d + j] += factor[i * 16 + k] * factor[j * 16 + k] / 16;
    }
    m[i * d + i] += 0.05;
  }
  const std::vector<double> u = oscar_test::feedback_ref(m, d, 0.01);
  const std::vector<float> feedback(u.begin(), u.end());
  std::vector<float> x(d * rows);
  for (float& value : x) value = oscar::bf16_to_float(oscar::float_to_bf16(normal(rng)));
  RowQuantizer q{.head_dim = d, .format = {.quant_group_size = d}, .recipe = {.clip_ratio = .95f}};
  const Encoded plain = encode(q, x, true);
  q.recipe.rounding = Rounding::kShaped;
  q.feedback = feedback.data();
  const Encoded shaped = encode(q, x, true);
  double loss[2] = {0.0, 0.0};
  for (int r = 0; r < rows; ++r) {
    loss[0] += oscar_test::metric_loss(&x[r * d], &plain.dequantized[r * d], m, d);
    loss[1] += oscar_test::metric_loss(&x[r * d], &shaped.dequantized[r * d], m, d);
  }
  EXPECT_LT(loss[1], 0.6 * loss[0]);
}

TEST(ScaleCorrection, GivesTheRegressionSlopeOneAndRefusesMeaninglessQuotients) {
  EXPECT_EQ(oscar::correction_factor(0.0f, 1.0f), 1.0f);
  EXPECT_EQ(oscar::correction_factor(1.0f, -1.0f), 1.0f);
  EXPECT_EQ(oscar::correction_factor(1.0f, 1e-7f), 1.0f);
  EXPECT_EQ(oscar::correction_factor(1.0f, std::numeric_limits<float>::quiet_NaN()), 1.0f);
  EXPECT_EQ(oscar::correction_factor(9.0f, 1.0f), 2.0f);
  EXPECT_EQ(oscar::correction_factor(1.0f, 9.0f), 0.5f);
  const int d = 128;
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  std::vector<float> x(d);
  for (float& value : x) value = oscar::bf16_to_float(oscar::float_to_bf16(normal(rng)));
  const RowQuantizer q{
      .head_dim = d,
      .format = {.quant_group_size = d, .metadata = MetadataDtype::kFp32},
      .recipe = {.clip_ratio = .9f, .scale_correction = ScaleCorrection::kUnbiased}};
  const Encoded row = encode(q, x, false);
  double xx = 0.0, xy = 0.0;
  for (int i = 0; i < d; ++i) {
    xx += static_cast<double>(x[i]) * x[i];
    xy += static_cast<double>(x[i]) * row.dequantized[i];
  }
  EXPECT_NEAR(xy / xx, 1.0, 1e-5);
}

TEST(Numeric, Fp16ConversionsAgreeWithTheirDefinitionOnEveryPattern) {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const float value = oscar::fp16_to_float(static_cast<uint16_t>(half));
    if (std::isnan(value)) continue;
    ASSERT_EQ(oscar::float_to_fp16(value), half);
    const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 31) continue;
    const double expected =
        (half & 0x8000 ? -1.0 : 1.0) *
        (exponent ? std::ldexp(1024.0 + mantissa, static_cast<int>(exponent) - 25)
                  : std::ldexp(static_cast<double>(mantissa), -24));
    ASSERT_EQ(value, expected);
  }
}

}  // namespace
