// Rows that a GPU writes equal the CPU's to the bit.
#include "oscar/attention/device_rows.h"

#include <gtest/gtest.h>

#include <cmath>

#include "oscar/attention/int2_attention.h"
#include "oscar/base/error.h"
#include "support/cuda_device.h"

namespace {

using namespace oscar;

// Every writer, clipping, group size and metadata dtype, with rows of which a block holds only
// some.
TEST(RowsOnTheGpu, EqualTheCpusToTheBit) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  if (!has_device_rows()) GTEST_SKIP() << "built without kernels";
  torch::manual_seed(4);
  for (const int64_t d : {8, 64, 80, 128, 256}) {
    const auto eye = torch::eye(d).repeat({4, 1, 1});
    const auto noise = torch::randn({4, d, d}) / std::sqrt(static_cast<double>(d));
    for (const auto metadata : {MetadataDtype::kFp16, MetadataDtype::kBf16, MetadataDtype::kFp32}) {
      for (const int64_t group : {d, int64_t{8}}) {
        for (const bool shaped : {true, false}) {
          SideCodec side;
          side.forward = eye;
          using enum ScaleCorrection;
          const Rounding rounding = shaped ? Rounding::kShaped : Rounding::kPlain;
          side.recipe.push_back({0.0f, kNone, Rounding::kPlain});
          side.recipe.push_back({0.5f, kUnbiased, rounding});
          side.recipe.push_back({0.92f, kMetric, rounding});
          side.recipe.push_back({1.0f, kMetric, Rounding::kPlain});
          side.metric = torch::matmul(noise, noise.transpose(1, 2)) + 0.1 * eye;
          if (shaped) side.feedback = eye + 0.5 * noise.triu(1);
          side.format = {static_cast<int>(group), metadata, {}};
          auto rows = torch::randn({2, 4, 77, d});
          rows.select(2, 0).zero_();
          rows.select(2, 1).fill_(3.25f);
          rows.select(2, 2).mul_(1e-6f).add_(1000.0f);
          const auto expected = quantize_dequantize(side, rows, "test");
          SideCodec on_device = side;
          on_device.metric = side.metric.to(torch::kCUDA);
          if (shaped) on_device.feedback = side.feedback.to(torch::kCUDA);
          const auto found = quantize_dequantize(on_device, rows.to(torch::kCUDA), "test").cpu();
          EXPECT_TRUE(torch::equal(found, expected))
              << d << ", groups of " << group << ", shaped " << shaped;
        }
      }
    }
  }
}

TEST(RowsOnTheGpu, EqualTheCpusUnderTheRulesOfOtherBackends) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  if (!has_device_rows()) GTEST_SKIP() << "built without kernels";
  torch::manual_seed(5);
  auto rows = torch::randn({2, 2, 300, 128});
  rows.select(2, 0).zero_();
  rows.select(2, 1).fill_(3.25f);
  rows.select(2, 2).mul_(1e-3f).add_(100.0f);
  rows.select(2, 3).copy_(torch::arange(128).remainder(7).to(torch::kFloat32));  // ties
  for (int bits = 0; bits < 16; ++bits) {
    for (const auto metadata : {MetadataDtype::kFp16, MetadataDtype::kBf16, MetadataDtype::kFp32}) {
      SideCodec side;
      side.forward = torch::eye(128).repeat({2, 1, 1});
      side.recipe.push_back({.clip_ratio = 0.0f});
      side.recipe.push_back({.clip_ratio = 0.92f});
      side.format = {
          32,
          metadata,
          {static_cast<ClipSpan>(bits & 1), static_cast<ZeroForm>(bits >> 1 & 1),
           static_cast<CodeTies>(bits >> 2 & 1), static_cast<MetadataRounding>(bits >> 3 & 1)}};
      const auto expected = quantize_dequantize(side, rows, "test");
      const auto found = quantize_dequantize(side, rows.to(torch::kCUDA), "test").cpu();
      EXPECT_TRUE(torch::equal(found, expected)) << "rules " << bits;
    }
  }
}

TEST(RowsOnTheGpu, RefuseWhatTheCpuRefuses) {
  if (!oscar_test::has_cuda_device()) GTEST_SKIP() << "no CUDA device";
  if (!has_device_rows()) GTEST_SKIP() << "built without kernels";
  SideCodec side;
  side.forward = torch::eye(64).unsqueeze(0);
  side.recipe.push_back({});
  side.format.quant_group_size = 64;
  for (const float bad : {std::nanf(""), INFINITY, 3e38f}) {
    auto rows = torch::randn({1, 1, 40, 64});
    rows[0][0][35][3] = bad;
    EXPECT_THROW(quantize_dequantize(side, rows, "test"), Error);
    EXPECT_THROW(quantize_dequantize(side, rows.to(torch::kCUDA), "test"), Error);
  }
}

}  // namespace
