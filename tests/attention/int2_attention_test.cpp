#include "oscar/attention/int2_attention.h"

#include <gtest/gtest.h>

#include "oscar/base/error.h"
#include "oscar/cache/codec.h"
#include "oscar/cache/quantize_rows.h"

// The INT2 rule against a cache simulated token by token.

namespace {

using oscar::CacheModeKind;
using oscar::CacheView;

// A cache that appends tokens one by one and demotes whole blocks: the number of demoted tokens
// after `length` appends.
int64_t demoted_after(const CacheView& view, int64_t length) {
  int64_t demoted = 0;
  for (int64_t held = 1; held <= length; ++held) {
    const int64_t recent = held - std::min(held, view.sink) - demoted;
    if (recent - view.recent >= view.demote_block) demoted += view.demote_block;
  }
  return demoted;
}

TEST(CacheView, DecodeAgreesWithACacheSimulatedTokenByToken) {
  for (const int64_t sink : {0, 1, 4}) {
    for (const int64_t recent : {0, 1, 3, 8}) {
      for (const int64_t block : {1, 2, 5, 16}) {
        const CacheView view{.sink = sink, .recent = recent, .demote_block = block};
        for (int64_t i = 0; i < 60; ++i) {
          ASSERT_EQ(int2_end(view, i), sink + demoted_after(view, i + 1))
              << "sink " << sink << " recent " << recent << " block " << block << " query " << i;
        }
      }
    }
  }
}

TEST(CacheView, WithBlockOneAKeyIsInt2WhenItIsOldAndNoSink) {
  const CacheView view{.sink = 4, .recent = 8};
  for (int64_t i = 0; i < 40; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      EXPECT_EQ(j >= 4 && j < int2_end(view, i), i - j >= 8 && j >= 4) << i << " " << j;
    }
  }
}

TEST(CacheView, PrefillReadsThePromptExactlyAndGeneratedTokensReadItAsInt2) {
  const CacheView view{.sink = 2, .recent = 4, .mode = CacheModeKind::kPrefill, .prompt = 20};
  const CacheView decode{.sink = 2, .recent = 4};
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(int2_end(view, i), 2);
  for (int64_t i = 20; i < 40; ++i) EXPECT_EQ(int2_end(view, i), int2_end(decode, i));
}

TEST(CacheView, AChunkSeesTheCacheAsItStoodWhenTheChunkBegan) {
  const CacheView view{.sink = 2,
                       .recent = 4,
                       .demote_block = 3,
                       .mode = CacheModeKind::kChunked,
                       .prefill_chunk = 10,
                       .prompt = 35};
  for (int64_t i = 0; i < 35; ++i) {
    EXPECT_EQ(int2_end(view, i), 2 + demoted_after(view, i / 10 * 10)) << i;
    EXPECT_LE(int2_end(view, i), std::max<int64_t>(2, i / 10 * 10)) << "own chunk is exact";
  }
  for (int64_t i = 35; i < 60; ++i) EXPECT_EQ(int2_end(view, i), 2 + demoted_after(view, i + 1));
}

TEST(CacheView, ChunkedWithChunksOfOneTokenLagsDecodeByTheOwnToken) {
  const CacheView chunked{
      .sink = 1, .recent = 3, .mode = CacheModeKind::kChunked, .prefill_chunk = 1, .prompt = 100};
  const CacheView decode{.sink = 1, .recent = 3};
  for (int64_t i = 1; i < 30; ++i) EXPECT_EQ(int2_end(chunked, i), int2_end(decode, i - 1));
}

TEST(CacheView, BlocksCoverEveryQueryOnceAndBoundTheGrowthOfTheInt2Region) {
  for (const int64_t block : {1, 7, 40}) {
    const CacheView view{.sink = 3,
                         .recent = 5,
                         .demote_block = block,
                         .mode = CacheModeKind::kChunked,
                         .prefill_chunk = 30,
                         .prompt = 77};
    int64_t next = 4;
    for (const auto& [first, last] : query_blocks(view, 4, 211, 16)) {
      ASSERT_EQ(first, next);
      ASSERT_GT(last, first);
      ASSERT_LE(last - first, 16);
      ASSERT_LE(int2_end(view, last - 1) - int2_end(view, first), 16);
      next = last;
    }
    EXPECT_EQ(next, 211);
  }
}

TEST(CacheView, ASlidingWindowHidesTheKeysBeforeIt) {
  const CacheView view{.sink = 0, .recent = 8, .sliding_window = 9};
  EXPECT_EQ(first_visible(view, 20), 12);
  EXPECT_EQ(first_visible(view, 3), 0);
}

TEST(CacheView, ModeNamesRoundTripAndNonsenseIsRefused) {
  CacheView view;
  for (const char* name : {"decode", "prefill", "chunked:2048"}) {
    parse_cache_mode(name, view);
    EXPECT_EQ(cache_mode_name(view), name);
  }
  for (const char* name : {"", "chunked", "chunked:", "chunked:0", "chunked:-4", "chunked:8k"}) {
    EXPECT_THROW(parse_cache_mode(name, view), oscar::UsageError) << name;
  }
}

TEST(CacheView, BitsPerElementMatchThePublishedFigures) {
  EXPECT_NEAR(oscar::bits_per_element({}, 131072, 64, 256), 2.284, 5e-4);
  EXPECT_NEAR(oscar::bits_per_element({}, 32768, 64, 256), 2.384, 5e-4);
  EXPECT_NEAR(oscar::bits_per_element({}, 8192, 64, 256), 2.787, 5e-4);
  EXPECT_EQ(oscar::bits_per_element({}, 320, 64, 256), 16.0);
}

}  // namespace

// Block-wise attention over mixed rows against the definition in float64, query by query.

namespace {

using oscar::CacheModeKind;
using oscar::CacheRows;
using oscar::CacheView;
using oscar::LayerCodec;
using oscar::ScaleCorrection;

struct Inputs {
  torch::Tensor q;
  CacheRows rows;
};

Inputs random_inputs(int64_t batch, int64_t hq, int64_t hkv, int64_t tokens, int64_t d) {
  torch::manual_seed(11);
  const auto rows = [&] { return torch::randn({batch, hkv, tokens, d}); };
  Inputs in{torch::randn({batch, hq, tokens, d}), {rows(), {}, rows(), {}}};
  // Far from the exact rows, so that one wrong choice shows.
  in.rows.k_int2 = -in.rows.k_exact + 0.5 * rows();
  in.rows.v_int2 = in.rows.v_exact + 3.0;
  return in;
}

// Straight from the definition: for each query, pick each key's version, softmax in float64.
torch::Tensor attend_ref(const CacheView& view, const Inputs& in, double scale, int64_t start) {
  const int64_t group = in.q.size(1) / in.rows.k_exact.size(1), tokens = in.q.size(2);
  auto out =
      torch::zeros({in.q.size(0), in.q.size(1), tokens - start, in.q.size(3)}, torch::kFloat64);
  for (int64_t i = start; i < tokens; ++i) {
    auto int2 = torch::zeros({tokens, 1}, torch::kBool);
    auto visible = torch::zeros({tokens}, torch::kBool);
    for (int64_t j = 0; j <= i; ++j) {
      visible[j] = view.sliding_window == 0 || i - j < view.sliding_window;
      int2[j] = j >= view.sink && j < oscar::int2_end(view, i);
    }
    for (int64_t b = 0; b < in.q.size(0); ++b) {
      for (int64_t j = 0; j < in.q.size(1); ++j) {
        const auto pick = [&](const torch::Tensor& exact, const torch::Tensor& rounded) {
          return torch::where(int2, rounded[b][j / group], exact[b][j / group]).to(torch::kFloat64);
        };
        const auto k = pick(in.rows.k_exact, in.rows.k_int2);
        const auto v = pick(in.rows.v_exact, in.rows.v_int2);
        auto scores = torch::mv(k, in.q[b][j][i].to(torch::kFloat64)) * scale;
        scores.masked_fill_(visible.logical_not(), -INFINITY);
        out[b][j][i - start].copy_(torch::mv(v.t(), scores.softmax(0)));
      }
    }
  }
  return out;
}

void expect_equal_to_reference(const CacheView& view, const Inputs& in, const char* what) {
  const auto got = attend_cache_rows(view, in.q, in.rows, 0.2);
  const auto expected = attend_ref(view, in, 0.2, 0);
  EXPECT_LT((got - expected).abs().max().item<double>(), 2e-5) << what;
}

TEST(Int2Attention, EveryModeEqualsTheDefinition) {
  const auto in = random_inputs(1, 4, 2, 620, 16);
  expect_equal_to_reference({.sink = 4, .recent = 20}, in, "decode");
  expect_equal_to_reference({.sink = 0, .recent = 1}, in, "no windows");
  expect_equal_to_reference({.sink = 4, .recent = 20, .demote_block = 64}, in, "block 64");
  expect_equal_to_reference({.sink = 4, .recent = 20, .demote_block = 300}, in, "block 300");
  expect_equal_to_reference(
      {.sink = 4, .recent = 20, .mode = CacheModeKind::kPrefill, .prompt = 500}, in, "prefill");
  expect_equal_to_reference({.sink = 4,
                             .recent = 20,
                             .mode = CacheModeKind::kChunked,
                             .prefill_chunk = 128,
                             .prompt = 620},
                            in, "chunked");
  expect_equal_to_reference({.sink = 700, .recent = 20}, in, "sinks longer than the sequence");
}

TEST(Int2Attention, SlidingWindowsSeeOnlyTheirKeys) {
  const auto in = random_inputs(1, 2, 1, 600, 8);
  expect_equal_to_reference({.sink = 4, .recent = 20, .sliding_window = 100}, in, "window 100");
  expect_equal_to_reference({.sink = 4, .recent = 20, .sliding_window = 20}, in, "window = recent");
  expect_equal_to_reference({.sink = 4, .recent = 20, .demote_block = 32, .sliding_window = 301},
                            in, "window 301, block 32");
}

TEST(Int2Attention, BatchesAndGroupsOfOneHeadAreIndependent) {
  expect_equal_to_reference({.sink = 2, .recent = 9}, random_inputs(3, 6, 2, 70, 8), "batch 3");
  expect_equal_to_reference({.sink = 2, .recent = 9}, random_inputs(2, 3, 3, 70, 8), "no groups");
  expect_equal_to_reference({.sink = 2, .recent = 9}, random_inputs(1, 2, 1, 1, 8), "one token");
}

TEST(Int2Attention, LaterQueriesAloneGiveTheSameRows) {
  const CacheView view{.sink = 4, .recent = 20, .demote_block = 8};
  const auto in = random_inputs(2, 4, 2, 300, 16);
  const auto got = attend_cache_rows(view, in.q.slice(2, 233), in.rows, 0.2);
  const auto expected = attend_ref(view, in, 0.2, 233);
  EXPECT_LT((got - expected).abs().max().item<double>(), 2e-5);
}

std::shared_ptr<LayerCodec> random_layer_codec(int64_t heads, int64_t d) {
  const auto codec = std::make_shared<LayerCodec>();
  for (auto* side : {&codec->key, &codec->value}) {
    side->forward = torch::eye(d) + 0.1 * torch::randn({heads, d, d}) / std::sqrt(d);
    side->mean = torch::randn({heads, d});
    side->recipe = oscar::SideRecipe(heads, {.clip_ratio = 0.95f});
    side->format.quant_group_size = static_cast<int>(d);
  }
  codec->key.partner = torch::linalg_inv(codec->key.forward).transpose(1, 2).contiguous();
  codec->value.partner = torch::linalg_inv(codec->value.forward).contiguous();
  return codec;
}

torch::Tensor exact_attention(const Inputs& in) {
  const CacheView everything{.sink = 1 << 20};
  return attend_ref(everything, in, 0.2, 0);
}

TEST(Int2Attention, TransformAndCenteringChangeNothingWhileTheCodecIsOff) {
  const auto in = random_inputs(2, 4, 2, 400, 16);
  const auto codec = random_layer_codec(2, 16);
  codec->int2_keys = codec->int2_values = false;
  oscar::Int2Attention engine({codec}, {.sink = 4, .recent = 20}, {0});
  const auto got = engine.attend(0, in.q, in.rows.k_exact, in.rows.v_exact, 0.2);
  EXPECT_LT((got - exact_attention(in)).abs().max().item<double>(), 2e-5);
}

TEST(Int2Attention, QuantizingOneSideLeavesTheOtherExact) {
  const auto in = random_inputs(1, 4, 2, 400, 16);
  const auto codec = random_layer_codec(2, 16);
  codec->int2_keys = false;
  oscar::Int2Attention engine({codec}, {.sink = 4, .recent = 20}, {0});
  const auto got = engine.attend(0, in.q, in.rows.k_exact, in.rows.v_exact, 0.2);
  // With constant values the output is that constant, rounded only through the value side.
  const auto flat = torch::ones_like(in.rows.v_exact);
  const auto constant = engine.attend(0, in.q, in.rows.k_exact, flat, 0.2);
  const auto basis = to_cache_basis(codec->value, flat);
  const auto error = quantize_dequantize(codec->value, basis, "test") - basis;
  EXPECT_LE((constant - 1.0).abs().max().item<double>(),
            torch::matmul(error.abs(), codec->value.partner.abs()).max().item<double>() + 1e-5);
  codec->int2_values = false;
  const auto exact = engine.attend(0, in.q, in.rows.k_exact, in.rows.v_exact, 0.2);
  EXPECT_GT((got - exact).abs().max().item<double>(), 1e-3);
}

TEST(Int2Attention, ACacheFilledTokenByTokenEqualsTheWholeSequence) {
  const auto in = random_inputs(1, 4, 2, 90, 16);
  const auto codec = random_layer_codec(2, 16);
  codec->key.centers = torch::randn({2, 2, 2, 16}).to(torch::kBFloat16).to(torch::kFloat32);
  for (const auto mode : {CacheModeKind::kDecode, CacheModeKind::kPrefill}) {
    const CacheView view{.sink = 4, .recent = 20, .mode = mode, .prompt = 60};
    oscar::Int2Attention whole({codec}, view, {0});
    whole.set_first_position(980);  // the second page lies in the second segment
    const auto expected = whole.attend(0, in.q, in.rows.k_exact, in.rows.v_exact, 0.2);
    oscar::Int2Attention stepping({codec}, view, {0});
    stepping.set_first_position(980);
    for (int repeat = 0; repeat < 2; ++repeat) {
      stepping.keep_cache(90);
      for (int64_t begin = 0; begin < 90; begin = begin == 0 ? 60 : begin + 1) {
        const int64_t end = begin == 0 ? 60 : begin + 1;
        const auto part = [&](const torch::Tensor& t) { return t.slice(2, begin, end); };
        const auto got =
            stepping.attend(0, part(in.q), part(in.rows.k_exact), part(in.rows.v_exact), 0.2);
        ASSERT_LT((got - part(expected)).abs().max().item<double>(), 1e-5) << begin;
      }
    }
  }
}

TEST(Int2Attention, ALayerWithoutCodecRunsExactly) {
  const auto in = random_inputs(1, 4, 2, 100, 16);
  oscar::Int2Attention engine({nullptr}, {.sink = 4, .recent = 20}, {0});
  const auto got = engine.attend(0, in.q, in.rows.k_exact, in.rows.v_exact, 0.2);
  EXPECT_LT((got - exact_attention(in)).abs().max().item<double>(), 2e-5);
}

}  // namespace

// The layer-wide INT2 codec against the cache library's plain rows.

namespace {

using oscar::CacheFormat;
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

CacheFormat settings(int group, oscar::MetadataDtype dtype = oscar::MetadataDtype::kFp16) {
  CacheFormat s;
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

TEST(SideCodec, RulesOfOtherBackendsTakePlainRowsOnly) {
  auto quantizer = settings(64);
  quantizer.rules.zero = oscar::ZeroForm::kMinimum;
  for (const bool shaped : {true, false}) {
    const auto transform =
        make_transform(64, shaped, shaped ? ScaleCorrection::kNone : ScaleCorrection::kMetric);
    const auto side = make_side_codec(transform, Side::kKey, quantizer, 0, Rope{}, torch::kCPU);
    EXPECT_THROW(quantize_dequantize(side, hard_rows(64), "test"), oscar::Error);
  }
}

TEST(SideCodec, CentersAndRotatesRowsFromTheLeft) {
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

// Keys of two heads about centers of four segments, the second head without.
SideCodec with_centers(int d) {
  auto side = make_side_codec(make_transform(d, true, ScaleCorrection::kMetric), Side::kKey,
                              settings(d), 0, Rope{}, torch::kCPU);
  side.centers =
      (2 * torch::randn({4, kCodecHeads, 2, d})).to(torch::kBFloat16).to(torch::kFloat32);
  side.centers.select(1, 1).zero_();
  return side;
}

TEST(SideCodec, RowsAreCodedAboutTheNearerCenterOfTheirSegment) {
  const int d = 64;
  auto side = with_centers(d);
  const auto runs = segment_runs(side, {.first_token = 0, .first_position = 1900, .sink = 4}, 300);
  ASSERT_EQ(runs.size(), 2u);
  const auto rows = hard_rows(d);
  const auto found = quantize_dequantize(side, rows, "test", runs);
  const auto z = rows.to(torch::kBFloat16);
  const auto centers = side.centers.to(torch::kBFloat16);
  side.centers = torch::Tensor();
  for (int64_t b = 0; b < 2; ++b) {
    for (const oscar::SegmentRun& run : runs) {
      const auto own = centers[run.segment][0].contiguous();
      auto about = torch::empty({1, kCodecHeads, run.end - run.begin, d});
      about[0][1].copy_(z[b][1].slice(0, run.begin, run.end));
      std::vector<int> nearer;
      for (int64_t t = run.begin; t < run.end; ++t) {
        const auto row = z[b][0][t].contiguous();
        nearer.push_back(oscar::nearest_center(static_cast<uint16_t*>(row.data_ptr()),
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
    side.centers = torch::zeros({segments, kCodecHeads, 2, 8});
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
  side.centers = torch::Tensor();
  EXPECT_TRUE(segment_runs(side, {}, 100).empty());
}

TEST(SideCodec, AGroupThatDoesNotDivideTheHeadIsRefused) {
  EXPECT_THROW(make_side_codec(make_transform(64, false, ScaleCorrection::kNone), Side::kKey,
                               settings(48), 0, Rope{}, torch::kCPU),
               oscar::Error);
}

}  // namespace
