#include "oscar/attention/wide_codes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "attention/random_codec.h"
#include "oscar/base/error.h"

namespace {

using oscar::quantize_dequantize;
using oscar::quantize_dequantize_wide;
using oscar::SideCodec;

constexpr int64_t kHeads = 3, kTokens = 200, kDim = 64;

torch::Tensor rows_of(const SideCodec& side) {
  const auto x = oscar_test::random_sequences(2, kHeads, kHeads, kTokens, kDim).k;
  return to_cache_basis(side, x).to(torch::kBFloat16).to(torch::kFloat32);
}

// The codec of cache/codec.h at the width that both have. Sums in another order may carry a value
// over a threshold, and what follows it in its row.
TEST(WideCodes, AtTwoBitsTheyAreTheCacheLibrarysCodec) {
  torch::manual_seed(1);
  for (const bool shaped : {false, true}) {
    for (const int64_t group : {int64_t{16}, kDim}) {
      const auto codec = oscar_test::random_codec(kHeads, kDim, {.shaped = shaped, .group = group});
      for (const SideCodec* side : {&codec->key, &codec->value}) {
        const auto x = rows_of(*side);
        const auto library = quantize_dequantize(*side, x, "test");
        const auto wide = quantize_dequantize_wide(*side, x, "test");
        const auto differs = (wide - library).abs().amax(3).gt(1e-5 * x.abs().amax(3));
        EXPECT_LE(differs.to(torch::kFloat64).mean().item<double>(), 0.01)
            << "shaped " << shaped << ", group " << group;
        EXPECT_GT((wide - x).abs().max().item<double>(), 0.1);
      }
    }
  }
}

TEST(WideCodes, WithoutClippingNoValueErrsByMoreThanHalfAStep) {
  torch::manual_seed(2);
  const auto codec = oscar_test::random_codec(kHeads, kDim, {.identity = true, .group = 16});
  SideCodec side = codec->key;
  std::ranges::fill(side.recipe.clip_ratio, 0.0f);
  const auto x = rows_of(side);
  const auto groups = x.unflatten(3, {-1, 16});
  const auto range = (groups.amax(4, true) - groups.amin(4, true)).expand_as(groups).flatten(3);
  for (side.code_bits = 1; side.code_bits <= oscar::kMostCodeBits; ++side.code_bits) {
    const auto error = (quantize_dequantize(side, x, "test") - x).abs();
    const auto step = range / ((1 << side.code_bits) - 1);
    // fp16 metadata: half a unit of 2^-10 of the scale, for each of up to 255 steps and the zero.
    EXPECT_LE((error - step / 2 - range * 0x1p-10).max().item<double>(), 0.0) << side.code_bits;
  }
}

TEST(WideCodes, EachBitMoreTakesAThirdToATenthOfTheError) {
  torch::manual_seed(3);
  for (const bool shaped : {false, true}) {
    const auto codec = oscar_test::random_codec(kHeads, kDim, {.shaped = shaped});
    SideCodec side = codec->key;
    std::ranges::fill(side.recipe.clip_ratio, 0.0f);
    const auto x = rows_of(side);
    double before = 0;
    for (side.code_bits = 2; side.code_bits <= 6; ++side.code_bits) {
      auto error = quantize_dequantize_wide(side, x, "test") - x;
      if (shaped) error = error * torch::matmul(error, side.metric);  // e M e^T
      const double mean = (shaped ? error.sum(3) : error.square()).mean().item<double>();
      if (before > 0) {
        EXPECT_GT(mean, before / 10) << shaped << " " << side.code_bits;
        EXPECT_LT(mean, before / 3) << shaped << " " << side.code_bits;
      }
      before = mean;
    }
  }
}

TEST(WideCodes, KeysAreCodedAroundTheNearerCenter) {
  torch::manual_seed(4);
  const auto codec = oscar_test::random_codec(kHeads, kDim, {.identity = true});
  SideCodec side = codec->key;
  std::ranges::fill(side.recipe.clip_ratio, 0.0f);
  side.code_bits = 4;
  side.centers = torch::zeros({1, kHeads, 2, kDim});
  side.centers.select(2, 1).fill_(100);
  auto x = rows_of(side);
  x.slice(2, 0, 50) += 100;
  const std::vector<oscar::SegmentRun> runs = {{0, kTokens, 0}};
  const auto error = (quantize_dequantize(side, x, "test", runs) - x).abs();
  EXPECT_LE(error.max().item<double>(), 1.0) << "a step of rows of +-4, and bf16 of 100";
}

TEST(WideCodes, RowsThatTheCodecRefusesAreNamed) {
  const auto codec = oscar_test::random_codec(kHeads, kDim, {.identity = true});
  SideCodec side = codec->key;
  std::ranges::fill(side.recipe.clip_ratio, 0.0f);
  side.code_bits = 4;
  auto x = rows_of(side);
  x[0][0][0][0] = NAN;
  EXPECT_THROW(quantize_dequantize(side, x, "layer 7"), oscar::Error);
  x[0][0][0][0] = 1e38;
  EXPECT_THROW(quantize_dequantize(side, x, "layer 7"), oscar::Error);
  side.format.rules.zero = oscar::ZeroForm::kMinimum;
  x[0][0][0][0] = 1;
  EXPECT_THROW(quantize_dequantize(side, x, "layer 7"), oscar::Error);
}

}  // namespace
