// The layer-wide INT2 codec against the cache library's plain rows.
#include "oscar/int2/side_codec.h"

#include <gtest/gtest.h>

#include "oscar/base/error.h"
#include "oscar/cache/quantize_rows.h"

namespace {

using oscar::QuantizerSettings;
using oscar::ScaleCorrection;
using oscar::Side;
using oscar::SideCodec;
using oscar::SideTransform;

constexpr int kCodecHeads = 2;

// A transform of every feature, with arbitrary but fixed entries.
SideTransform make_transform(int d, bool shaped, ScaleCorrection correction) {
  torch::manual_seed(d);
  SideTransform t;
  const auto fill = [&](oscar::MatrixStack<float>& m, const torch::Tensor& values) {
    m = oscar::MatrixStack<float>(kCodecHeads, d, d);
    const auto flat = values.contiguous();
    std::copy_n(flat.data_ptr<float>(), m.data.size(), m.data.begin());
  };
  const auto eye = torch::eye(d).expand({kCodecHeads, d, d});
  fill(t.forward, eye + 0.05 * torch::randn({kCodecHeads, d, d}));
  t.kind.assign(kCodecHeads, oscar::TransformKind::kBalanced);
  fill(t.partner, torch::linalg_inv(eye + 0.05 * torch::randn({kCodecHeads, d, d})));
  t.mean = oscar::VectorStack<float>(kCodecHeads, d);
  for (size_t i = 0; i < t.mean.data.size(); ++i) t.mean.data[i] = 0.01f * static_cast<float>(i);
  const auto rounding = shaped ? oscar::Rounding::kShaped : oscar::Rounding::kPlain;
  t.recipe.push_back({0.96f, correction, rounding});
  t.recipe.push_back({0.0f, ScaleCorrection::kNone, rounding});
  const auto root = torch::randn({kCodecHeads, d, d}) / std::sqrt(d);
  fill(t.metric, torch::matmul(root, root.transpose(1, 2)) + eye);
  if (shaped) fill(t.feedback, eye + 0.1 * torch::randn({kCodecHeads, d, d}).triu(1));
  return t;
}

// Ordinary rows and the hard ones: zero, constant, tiny range on a large mean, ties, one outlier.
torch::Tensor hard_rows(int d) {
  torch::manual_seed(7);
  auto x = torch::randn({2, kCodecHeads, 300, d});
  for (int h = 0; h < kCodecHeads; ++h) {
    auto rows = x[0][h];
    rows[0].zero_();
    rows[1].fill_(3.25f);
    rows[2].copy_(1000.0f + 1e-3f * torch::randn({d}));
    rows[3].copy_(torch::arange(d).remainder(4).to(torch::kFloat32) - 1.5f);
    rows[4].zero_()[d / 2] = -17.0f;
    rows[5].fill_(-1e-30f);
  }
  return x;
}

torch::Tensor plain_rows(const SideCodec& side, const torch::Tensor& rows) {
  const auto x = rows.to(torch::kBFloat16).to(torch::kFloat32).contiguous();
  auto out = torch::empty_like(x);
  for (int64_t b = 0; b < x.size(0); ++b) {
    for (int64_t h = 0; h < x.size(1); ++h) {
      const auto status =
          quantize_rows_ref(row_quantizer(side, h), x[b][h].data_ptr<float>(), x.size(2),
                            {.dequantized = out[b][h].data_ptr<float>()});
      EXPECT_EQ(status.status, oscar::RowStatus::kOk);
    }
  }
  return out;
}

QuantizerSettings settings(int group, oscar::MetadataDtype dtype = oscar::MetadataDtype::kFp16) {
  QuantizerSettings s;
  s.quant_group_size = group;
  s.metadata_dtype = dtype;
  return s;
}

TEST(SideCodec, RowsOfAllHeadsEqualTheCachesPlainLoopToTheBit) {
  using enum oscar::MetadataDtype;
  for (const auto correction :
       {ScaleCorrection::kNone, ScaleCorrection::kUnbiased, ScaleCorrection::kMetric}) {
    for (const bool shaped : {false, true}) {
      for (const auto& [d, group, dtype] :
           {std::tuple{64, 64, kFp16}, {128, 32, kBf16}, {256, 256, kFp32}}) {
        const auto side = make_side_codec(make_transform(d, shaped, correction), Side::kKey,
                                          settings(group, dtype), 0, torch::kCPU);
        const auto rows = hard_rows(d);
        EXPECT_TRUE(torch::equal(quantize_dequantize(side, rows, "test"), plain_rows(side, rows)))
            << d << ", shaped " << shaped;
      }
    }
  }
}

TEST(SideCodec, RulesOfOtherStacksTakePlainRowsOnly) {
  auto quantizer = settings(64);
  quantizer.rules.zero = oscar::ZeroForm::kMinimum;
  for (const bool shaped : {true, false}) {
    const auto transform =
        make_transform(64, shaped, shaped ? ScaleCorrection::kNone : ScaleCorrection::kMetric);
    const auto side = make_side_codec(transform, Side::kKey, quantizer, 0, torch::kCPU);
    EXPECT_THROW(quantize_dequantize(side, hard_rows(64), "test"), oscar::Error);
  }
}

TEST(SideCodec, CentresAndRotatesRowsFromTheLeft) {
  const int d = 64;
  const auto t = make_transform(d, false, ScaleCorrection::kNone);
  const auto side = make_side_codec(t, Side::kKey, settings(d), 0, torch::kCPU);
  const auto x = torch::randn({1, kCodecHeads, 3, d});
  const auto got = to_cache_basis(side, x);
  for (int h = 0; h < kCodecHeads; ++h) {
    for (int column = 0; column < d; ++column) {
      double sum = 0;
      for (int i = 0; i < d; ++i) {
        sum += (x[0][h][2][i].item<double>() - t.mean[h][i]) * t.forward[h](i, column);
      }
      ASSERT_NEAR(got[0][h][2][column].item<double>(), sum, 1e-5);
    }
  }
}

TEST(SideCodec, NonFiniteRowsAndOverflowingMetadataAreRefusedByName) {
  const auto side = make_side_codec(make_transform(64, false, ScaleCorrection::kNone), Side::kKey,
                                    settings(64), 0, torch::kCPU);
  for (const float bad : {std::nanf(""), INFINITY, 3e38f}) {
    auto rows = torch::randn({1, kCodecHeads, 8, 64});
    rows[0][1][5][3] = bad;
    try {
      quantize_dequantize(side, rows, "layer 9, keys");
      FAIL() << bad;
    } catch (const oscar::Error& error) {
      EXPECT_NE(error.info().where.find("layer 9, keys"), std::string::npos);
    }
  }
}

TEST(SideCodec, AGroupThatDoesNotDivideTheHeadIsRefused) {
  EXPECT_THROW(make_side_codec(make_transform(64, false, ScaleCorrection::kNone), Side::kKey,
                               settings(48), 0, torch::kCPU),
               oscar::Error);
}

}  // namespace
