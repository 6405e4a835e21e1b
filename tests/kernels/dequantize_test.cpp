// Rows through the codec and back on the GPU against the CPU's plain version, bit for bit.
#include "oscar_kernels/dequantize.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "cache/codec_ref.h"
#include "kernels/device_memory.h"
#include "oscar/cache/quantize_rows.h"

namespace {

using oscar::MetadataDtype;
using oscar::Rounding;
using oscar::RowRecipe;
using oscar::RowStatus;
using oscar::ScaleCorrection;
using oscar_test::DeviceBuffer;

constexpr int kBatch = 2, kTokens = 77;  // blocks of 32 rows, the last one not full

// Rows of one call and how its heads are written.
struct Rows {
  int d = 0;
  oscar::RowFormat format;
  std::vector<RowRecipe> heads;
  std::vector<float> x;                 // [kBatch, heads, kTokens, d], bf16 numbers
  std::vector<float> feedback, metric;  // [heads, d, d]

  Rows(int head_dim, const oscar::RowFormat& f, std::vector<RowRecipe> recipes, unsigned seed)
      : d(head_dim), format(f), heads(std::move(recipes)) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    x.resize(kBatch * heads.size() * kTokens * d);
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t row = i / d;
      float value = normal(rng);
      if (row % 16 == 1) value = 0.0f;
      if (row % 16 == 2) value = 3.25f;
      if (row % 16 == 3) value = 1000.0f + 1e-2f * value;
      if (row % 16 == 4) value = static_cast<float>(i % 7);  // ties
      if (row % 16 == 5 && i % 32 == 9) value *= 50.0f;
      x[i] = oscar::bf16_to_float(oscar::float_to_bf16(value));
    }
    for (size_t h = 0; h < heads.size(); ++h) {
      std::vector<double> factor(static_cast<size_t>(d) * 4), m(static_cast<size_t>(d) * d);
      for (double& value : factor) value = normal(rng);
      for (int i = 0; i < d; ++i) {
        for (int j = 0; j < d; ++j) {
          for (int k = 0; k < 4; ++k) m[i * d + j] += factor[i * 4 + k] * factor[j * 4 + k];
        }
        m[i * d + i] += 0.05;
      }
      const std::vector<double> u = oscar_test::feedback_ref(m, d, 0.01);
      feedback.insert(feedback.end(), u.begin(), u.end());
      metric.insert(metric.end(), m.begin(), m.end());
    }
  }

  size_t rows_of_head(int b, size_t h) const { return (b * heads.size() + h) * kTokens * d; }

  std::vector<float> expected() const {
    std::vector<float> out(x.size());
    for (int b = 0; b < kBatch; ++b) {
      for (size_t h = 0; h < heads.size(); ++h) {
        const oscar::RowQuantizer quantizer{.head_dim = d,
                                            .format = format,
                                            .recipe = heads[h],
                                            .feedback = &feedback[h * d * d],
                                            .metric = &metric[h * d * d]};
        const size_t at = rows_of_head(b, h);
        EXPECT_EQ(quantize_rows_ref(quantizer, &x[at], kTokens, {.dequantized = &out[at]}).status,
                  RowStatus::kOk);
      }
    }
    return out;
  }
};

// The same rows in device memory; the output is NaN until it is written.
struct OnDevice {
  explicit OnDevice(const Rows& rows)
      : x(rows.x),
        out(rows.x.size()),
        feedback(rows.feedback),
        metric(rows.metric),
        clip_ratios(rows.heads.size()),
        corrections(rows.heads.size()),
        roundings(rows.heads.size()),
        status(1) {
    std::vector<float> clips;
    std::vector<uint8_t> correction, rounding;
    for (const RowRecipe& recipe : rows.heads) {
      clips.push_back(recipe.clip_ratio);
      correction.push_back(static_cast<uint8_t>(recipe.scale_correction));
      rounding.push_back(static_cast<uint8_t>(recipe.rounding));
    }
    clip_ratios.upload(clips);
    corrections.upload(correction);
    roundings.upload(rounding);
    out.fill(0xff);
    status.fill(0);
    params = {.x = x.get(),
              .out = out.get(),
              .batch = kBatch,
              .tokens = kTokens,
              .num_heads = static_cast<int>(rows.heads.size()),
              .head_dim = rows.d,
              .format = rows.format,
              .writer = {.clip_ratios = clip_ratios.get(),
                         .corrections = corrections.get(),
                         .roundings = roundings.get(),
                         .feedback = feedback.get(),
                         .metric = metric.get()},
              .status = status.get()};
  }

  DeviceBuffer<float> x, out, feedback, metric, clip_ratios;
  DeviceBuffer<uint8_t> corrections, roundings;
  DeviceBuffer<int> status;
  oscar::DequantizeParams params;
};

// Where two arrays differ first in a bit, or their size.
size_t first_difference(const std::vector<float>& a, const std::vector<float>& b) {
  size_t i = 0;
  while (i < a.size() && std::bit_cast<uint32_t>(a[i]) == std::bit_cast<uint32_t>(b[i])) ++i;
  return i;
}

void expect_bits_of_cpu(const Rows& rows) {
  OnDevice device(rows);
  ASSERT_CUDA(dequantize_rows(device.params, nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  const std::vector<float> found = device.out.download(), expected = rows.expected();
  ASSERT_EQ(found.size(), expected.size());
  const size_t at = first_difference(found, expected);
  EXPECT_EQ(at, expected.size()) << found[at] << " for " << expected[at];
  EXPECT_EQ(device.status.download()[0], 0);
  EXPECT_TRUE(device.out.guards_intact() && device.status.guards_intact());
  EXPECT_EQ(first_difference(device.x.download(), rows.x), rows.x.size());
}

// Every way of writing, head beside head.
std::vector<RowRecipe> every_recipe() {
  std::vector<RowRecipe> all;
  for (const auto rounding : {Rounding::kPlain, Rounding::kShaped}) {
    for (const auto correction :
         {ScaleCorrection::kNone, ScaleCorrection::kUnbiased, ScaleCorrection::kMetric}) {
      all.push_back({all.size() % 2 == 0 ? 0.92f : 0.0f, correction, rounding});
    }
  }
  return all;
}

struct Case {
  std::string name;
  int d, group;
  MetadataDtype metadata;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class DequantizeRows : public testing::TestWithParam<Case> {};

TEST_P(DequantizeRows, GivesTheNumbersOfTheCpuForEveryWayOfWriting) {
  OSCAR_NEEDS_DEVICE();
  const Case& c = GetParam();
  expect_bits_of_cpu(
      {c.d, {.quant_group_size = c.group, .metadata = c.metadata}, every_recipe(), 7});
}
INSTANTIATE_TEST_SUITE_P(Formats, DequantizeRows,
                         testing::Values(Case{"d 8", 8, 8, MetadataDtype::kFp16},
                                         Case{"d 64 group 16 bf16", 64, 16, MetadataDtype::kBf16},
                                         Case{"d 80", 80, 80, MetadataDtype::kFp16},
                                         Case{"d 128", 128, 128, MetadataDtype::kFp16},
                                         Case{"d 128 group 32 fp32", 128, 32, MetadataDtype::kFp32},
                                         Case{"d 256 group 8", 256, 8, MetadataDtype::kFp16},
                                         Case{"d 256 fp32", 256, 256, MetadataDtype::kFp32}));

TEST(DequantizeRowsRules, OfOtherBackendsGiveTheNumbersOfTheCpu) {
  OSCAR_NEEDS_DEVICE();
  for (int bits = 0; bits < 16; ++bits) {
    SCOPED_TRACE("rules " + std::to_string(bits));
    const oscar::CodecRules rules{static_cast<oscar::ClipSpan>(bits & 1),
                                  static_cast<oscar::ZeroForm>(bits >> 1 & 1),
                                  static_cast<oscar::CodeTies>(bits >> 2 & 1),
                                  static_cast<oscar::MetadataRounding>(bits >> 3 & 1)};
    const auto metadata = bits % 3 == 0   ? MetadataDtype::kFp16
                          : bits % 3 == 1 ? MetadataDtype::kBf16
                                          : MetadataDtype::kFp32;
    expect_bits_of_cpu({64,
                        {.quant_group_size = 32, .metadata = metadata, .rules = rules},
                        {{.clip_ratio = 0.0f}, {.clip_ratio = 0.92f}},
                        static_cast<unsigned>(bits)});
  }
}

TEST(DequantizeRowsErrors, ARowThatIsNotFiniteIsReportedAndTheOthersAreRight) {
  OSCAR_NEEDS_DEVICE();
  const Rows good(128, {.quant_group_size = 128}, {RowRecipe{}}, 3);  // nothing is clipped
  const std::vector<float> expected = good.expected();
  using enum RowStatus;
  for (const auto& [bad, reported] :
       {std::pair{std::nanf(""), kNonFinite}, {INFINITY, kNonFinite}, {3e38f, kMetadataOverflow}}) {
    Rows rows = good;
    constexpr size_t kRow = 35;
    rows.x[kRow * 128 + 3] = bad;
    OnDevice device(rows);
    ASSERT_CUDA(dequantize_rows(device.params, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(device.status.download()[0], static_cast<int>(reported)) << bad;
    std::vector<float> found = device.out.download();
    std::copy_n(&expected[kRow * 128], 128, &found[kRow * 128]);
    EXPECT_EQ(first_difference(found, expected), expected.size()) << bad;
  }
}

TEST(DequantizeRowsArguments, SizesThatDoNotFitTogetherAreRefusedBeforeAnyLaunch) {
  const auto status = [](auto change) {
    oscar::DequantizeParams p{.batch = 1, .tokens = 1, .num_heads = 1, .head_dim = 128};
    change(p);
    return dequantize_rows(p, nullptr);
  };
  EXPECT_EQ(status([](auto& p) { p.head_dim = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.head_dim = 12; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.head_dim = 264; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.format.quant_group_size = 48; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.num_heads = 65536; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.tokens = 0; }), cudaSuccess);
}

}  // namespace
