// The layer-wide INT2 codec against the cache library's plain rows.
#include "oscar/int2/side_codec.h"

#include <gtest/gtest.h>

#include "oscar/base/error.h"
#include "oscar/cache/key_centres.h"
#include "oscar/cache/quantize_rows.h"

namespace {

using oscar::QuantizerSettings;
using oscar::Rope;
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
                                          settings(group, dtype), 0, Rope{}, torch::kCPU);
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
    const auto side = make_side_codec(transform, Side::kKey, quantizer, 0, Rope{}, torch::kCPU);
    EXPECT_THROW(quantize_dequantize(side, hard_rows(64), "test"), oscar::Error);
  }
}

TEST(SideCodec, CentresAndRotatesRowsFromTheLeft) {
  const int d = 64;
  const auto t = make_transform(d, false, ScaleCorrection::kNone);
  const auto side = make_side_codec(t, Side::kKey, settings(d), 0, Rope{}, torch::kCPU);
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
                                    settings(64), 0, Rope{}, torch::kCPU);
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

// Keys of two heads about centres of four segments, the second head without.
SideCodec with_centres(int d) {
  auto side = make_side_codec(make_transform(d, true, ScaleCorrection::kMetric), Side::kKey,
                              settings(d), 0, Rope{}, torch::kCPU);
  side.centres =
      (2 * torch::randn({4, kCodecHeads, 2, d})).to(torch::kBFloat16).to(torch::kFloat32);
  side.centres.select(1, 1).zero_();
  return side;
}

TEST(SideCodec, RowsAreCodedAboutTheNearerCentreOfTheirSegment) {
  const int d = 64;
  auto side = with_centres(d);
  const auto runs = segment_runs(side, {.first_token = 0, .first_position = 1900, .sink = 4}, 300);
  ASSERT_EQ(runs.size(), 2u);
  const auto rows = hard_rows(d);
  const auto found = quantize_dequantize(side, rows, "test", runs);
  const auto z = rows.to(torch::kBFloat16);
  const auto centres = side.centres.to(torch::kBFloat16);
  side.centres = torch::Tensor();
  for (int64_t b = 0; b < 2; ++b) {
    for (const oscar::SegmentRun& run : runs) {
      const auto own = centres[run.segment][0].contiguous();
      auto about = torch::empty({1, kCodecHeads, run.end - run.begin, d});
      about[0][1].copy_(z[b][1].slice(0, run.begin, run.end));
      std::vector<int> nearer;
      for (int64_t t = run.begin; t < run.end; ++t) {
        const auto row = z[b][0][t].contiguous();
        nearer.push_back(oscar::nearest_centre(static_cast<uint16_t*>(row.data_ptr()),
                                               static_cast<uint16_t*>(own.data_ptr()), d));
        about[0][0][t - run.begin].copy_(row.to(torch::kFloat32) - own[nearer.back()]);
      }
      const auto coded = plain_rows(side, about);
      for (int64_t t = run.begin; t < run.end; ++t) {
        const auto expected =
            coded[0][0][t - run.begin] + own[nearer[static_cast<size_t>(t - run.begin)]];
        ASSERT_TRUE(torch::equal(found[b][0][t], expected)) << t;
        ASSERT_TRUE(torch::equal(found[b][1][t], coded[0][1][t - run.begin])) << t;
      }
    }
  }
}

TEST(SideCodec, PagesOfARequestLieInTheSegmentOfTheirMiddle) {
  // Pages of 64 tokens behind a sink of 4: the one from token 1028 on, whose middle is 1060, is the
  // first of the second segment, whatever the segment of its first token.
  SideCodec side;
  const auto runs_of = [&](int64_t segments, const oscar::RowPlaces& places, int64_t rows) {
    side.centres = torch::zeros({segments, kCodecHeads, 2, 8});
    return segment_runs(side, places, rows);
  };
  const auto runs = runs_of(9, {.first_token = 100, .first_position = 0, .sink = 4}, 2000);
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(runs[0].end, 1028 - 100);
  EXPECT_EQ(runs[1].segment, 1);
  EXPECT_EQ(runs[2].end, 2000);
  const auto later = runs_of(3, {.first_token = 0, .first_position = 5000, .sink = 4}, 100);
  ASSERT_EQ(later.size(), 1u);
  EXPECT_EQ(later[0].segment, 2);
  side.centres = torch::Tensor();
  EXPECT_TRUE(segment_runs(side, {}, 100).empty());
}

TEST(SideCodec, AGroupThatDoesNotDivideTheHeadIsRefused) {
  EXPECT_THROW(make_side_codec(make_transform(64, false, ScaleCorrection::kNone), Side::kKey,
                               settings(48), 0, Rope{}, torch::kCPU),
               oscar::Error);
}

}  // namespace
