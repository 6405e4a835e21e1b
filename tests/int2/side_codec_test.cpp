// The layer-wide INT2 codec against the cache library's plain rows.
#include "oscar/int2/side_codec.h"

#include <gtest/gtest.h>

#include "oscar/base/error.h"
#include "oscar/cache/quantize_rows.h"

namespace {

using oscar::CacheSide;
using oscar::QuantizerSettings;
using oscar::ScaleCorrection;
using oscar::SideCodec;
using oscar::SideTransform;

constexpr int kHeads = 2;

// A transform of every feature, with arbitrary but fixed entries.
SideTransform make_transform(int d, bool shaped, ScaleCorrection correction) {
  torch::manual_seed(d);
  SideTransform t;
  const auto fill = [&](oscar::MatrixStack<float>& m, const torch::Tensor& values) {
    m = oscar::MatrixStack<float>(kHeads, d, d);
    const auto flat = values.contiguous();
    std::copy_n(flat.data_ptr<float>(), m.data.size(), m.data.begin());
  };
  const auto eye = torch::eye(d).expand({kHeads, d, d});
  fill(t.forward, eye + 0.05 * torch::randn({kHeads, d, d}));
  t.kind.assign(kHeads, oscar::TransformKind::kBalanced);
  fill(t.partner, torch::linalg_inv(eye + 0.05 * torch::randn({kHeads, d, d})));
  t.mean = oscar::VectorStack<float>(kHeads, d);
  for (size_t i = 0; i < t.mean.data.size(); ++i) t.mean.data[i] = 0.01f * static_cast<float>(i);
  t.clip_ratio = {0.96f, 0.0f};
  t.scale_correction = {correction, ScaleCorrection::kNone};
  const auto root = torch::randn({kHeads, d, d}) / std::sqrt(d);
  fill(t.metric, torch::matmul(root, root.transpose(1, 2)) + eye);
  if (shaped) fill(t.feedback, eye + 0.1 * torch::randn({kHeads, d, d}).triu(1));
  return t;
}

// Ordinary rows and the hard ones: zero, constant, tiny range on a large mean, ties, one outlier.
torch::Tensor hard_rows(int d) {
  torch::manual_seed(7);
  auto x = torch::randn({2, kHeads, 300, d});
  for (int h = 0; h < kHeads; ++h) {
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

QuantizerSettings settings(int group, const char* dtype) {
  QuantizerSettings s;
  s.quant_group_size = group;
  s.metadata_dtype = dtype;
  return s;
}

TEST(SideCodec, PlainRoundingInTorchEqualsTheCacheToTheBit) {
  for (const int d : {64, 128, 256}) {
    for (const char* dtype : {"fp16", "bf16", "fp32"}) {
      for (const int group : {d, 32}) {
        const auto side = make_side_codec(make_transform(d, false, ScaleCorrection::kNone),
                                          CacheSide::kKey, settings(group, dtype), 0, torch::kCPU);
        const auto rows = hard_rows(d);
        const auto expected = plain_rows(side, rows);
        EXPECT_TRUE(torch::equal(quantize_dequantize_torch(side, rows, "test"), expected))
            << d << " " << dtype << " " << group;
        EXPECT_TRUE(torch::equal(quantize_dequantize(side, rows, "test"), expected))
            << d << " " << dtype << " " << group;
      }
    }
  }
}

// [2^4] every combination of rules.
std::vector<oscar::CodecRules> all_rules() {
  std::vector<oscar::CodecRules> rules;
  for (int bits = 0; bits < 16; ++bits) {
    rules.push_back({static_cast<oscar::ClipSpan>(bits & 1),
                     static_cast<oscar::ZeroForm>(bits >> 1 & 1),
                     static_cast<oscar::CodeTies>(bits >> 2 & 1),
                     static_cast<oscar::MetadataRounding>(bits >> 3 & 1)});
  }
  return rules;
}

TEST(SideCodec, RulesOfOtherStacksInTorchEqualTheCacheToTheBit) {
  const int d = 64;
  const auto rows = hard_rows(d);
  const auto x = rows.to(torch::kBFloat16).to(torch::kFloat32).contiguous();
  for (const char* dtype : {"fp16", "bf16", "fp32"}) {
    for (const oscar::CodecRules& rules : all_rules()) {
      auto quantizer = settings(32, dtype);
      set_codec_rules(quantizer, rules);
      const auto side = make_side_codec(make_transform(d, false, ScaleCorrection::kNone),
                                        CacheSide::kKey, quantizer, 0, torch::kCPU);
      auto expected = torch::empty_like(x);
      for (int64_t b = 0; b < x.size(0); ++b) {
        for (int64_t h = 0; h < x.size(1); ++h) {
          write_and_read_rows(rules, row_quantizer(side, h), x[b][h].data_ptr<float>(), x.size(2),
                              expected[b][h].data_ptr<float>());
        }
      }
      EXPECT_TRUE(torch::equal(quantize_dequantize(side, rows, "test"), expected));
      EXPECT_TRUE(torch::equal(quantize_dequantize_torch(side, rows, "test"), expected))
          << dtype << " " << quantizer.clip_span << " " << quantizer.zero << " " << quantizer.ties
          << " " << quantizer.metadata_rounding;
    }
  }
}

TEST(SideCodec, RulesOfOtherStacksTakePlainRowsOnly) {
  auto quantizer = settings(64, "fp16");
  quantizer.zero = "minimum";
  for (const bool shaped : {true, false}) {
    const auto transform =
        make_transform(64, shaped, shaped ? ScaleCorrection::kNone : ScaleCorrection::kMetric);
    const auto side = make_side_codec(transform, CacheSide::kKey, quantizer, 0, torch::kCPU);
    EXPECT_THROW(quantize_dequantize(side, hard_rows(64), "test"), oscar::Error);
  }
  quantizer.zero = "middle";
  EXPECT_THROW(make_side_codec(make_transform(64, false, ScaleCorrection::kNone), CacheSide::kKey,
                               quantizer, 0, torch::kCPU),
               oscar::Error);
}

TEST(SideCodec, ShapedRoundingAndScaleCorrectionDifferInFewRowsOnly) {
  for (const auto correction :
       {ScaleCorrection::kNone, ScaleCorrection::kUnbiased, ScaleCorrection::kMetric}) {
    for (const bool shaped : {false, true}) {
      const int d = 128;
      const auto side = make_side_codec(make_transform(d, shaped, correction), CacheSide::kValue,
                                        settings(64, "fp16"), 0, torch::kCPU);
      torch::manual_seed(3);
      const auto rows = torch::randn({2, kHeads, 4000, d});
      const auto expected = plain_rows(side, rows);
      EXPECT_TRUE(torch::equal(quantize_dequantize(side, rows, "test"), expected));
      const auto got = quantize_dequantize_torch(side, rows, "test");
      // One scale may round to its fp16 neighbour; a flipped code moves a value by a whole step.
      const auto differs = (got - expected).abs().gt(2e-3 * expected.abs().amax(-1, true));
      const double fraction = differs.any(-1).to(torch::kFloat64).mean().item<double>();
      EXPECT_LE(fraction, 1e-3) << "shaped " << shaped;
      const auto loss = [&](const torch::Tensor& y) {
        const auto e = (y - rows.to(torch::kBFloat16)).to(torch::kFloat64);
        return (torch::matmul(e, torch::eye(d, torch::kFloat64)) * e).sum().item<double>();
      };
      EXPECT_NEAR(loss(got) / loss(expected), 1.0, 1e-4);
    }
  }
}

TEST(SideCodec, CentresAndRotatesRowsFromTheLeft) {
  const int d = 64;
  const auto t = make_transform(d, false, ScaleCorrection::kNone);
  const auto side = make_side_codec(t, CacheSide::kKey, settings(d, "fp16"), 0, torch::kCPU);
  const auto x = torch::randn({1, kHeads, 3, d});
  const auto got = to_cache_basis(side, x);
  for (int h = 0; h < kHeads; ++h) {
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
  const auto side = make_side_codec(make_transform(64, false, ScaleCorrection::kNone),
                                    CacheSide::kKey, settings(64, "fp16"), 0, torch::kCPU);
  for (const float bad : {std::nanf(""), INFINITY, 3e38f}) {
    auto rows = torch::randn({1, kHeads, 8, 64});
    rows[0][1][5][3] = bad;
    for (const auto run : {oscar::quantize_dequantize, oscar::quantize_dequantize_torch}) {
      try {
        run(side, rows, "layer 9, keys");
        FAIL() << bad;
      } catch (const oscar::Error& error) {
        EXPECT_NE(error.info().where.find("layer 9, keys"), std::string::npos);
      }
    }
  }
}

TEST(SideCodec, AGroupThatDoesNotDivideTheHeadIsRefused) {
  EXPECT_THROW(make_side_codec(make_transform(64, false, ScaleCorrection::kNone), CacheSide::kKey,
                               settings(48, "fp16"), 0, torch::kCPU),
               oscar::Error);
}

}  // namespace
