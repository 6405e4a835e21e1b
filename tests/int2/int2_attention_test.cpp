// Block-wise attention over mixed rows against the definition in float64, query by query.
#include "oscar/int2/int2_attention.h"

#include <gtest/gtest.h>

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
  expect_equal_to_reference(
      {.sink = 4, .recent = 20, .mode = CacheModeKind::kChunked, .chunk = 128, .prompt = 620}, in,
      "chunked");
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

TEST(Int2Attention, TransformAndCentringChangeNothingWhileTheCodecIsOff) {
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
  codec->key.centres = torch::randn({2, 2, 2, 16}).to(torch::kBFloat16).to(torch::kFloat32);
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
