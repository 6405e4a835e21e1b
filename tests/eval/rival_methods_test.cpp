#include <gtest/gtest.h>

#include "eval/tiny_model.h"
#include "oscar/eval/rival_codecs.h"

namespace {

using oscar::CacheView;
using oscar::find_rival;
using oscar::Method;
using oscar::RivalFormat;
using oscar_test::TinyModel;

constexpr int64_t kHeads = 2, kTokens = 300, kDim = 64;
constexpr double kScale = 0.125;

Method method_of(const TinyModel& tiny, const std::string& name) {
  return tiny.method(name, {}, torch::kCPU);
}

std::shared_ptr<oscar::LayerCodec> codec_of(const RivalFormat& rival) {
  auto codec = std::make_shared<oscar::LayerCodec>();
  for (auto* side : {&codec->key, &codec->value}) {
    side->forward = side->partner = torch::eye(kDim).repeat({kHeads, 1, 1});
    side->other = rival_codec(rival, side == &codec->key ? oscar::Side::kKey : oscar::Side::kValue,
                              kDim, rival.sink_tokens, torch::kCPU);
  }
  return codec;
}

CacheView view_of(const RivalFormat& rival) {
  return {
      .sink = rival.sink_tokens, .recent = rival.recent_tokens, .demote_block = rival.tile_tokens};
}

torch::Tensor random_rows() {
  const auto x = torch::randn({1, kHeads, kTokens, kDim});
  return x.to(torch::kBFloat16).to(torch::kFloat32);
}

// All scores at once, in float64.
torch::Tensor plain_attention(const RivalFormat& rival, const torch::Tensor& q,
                              const torch::Tensor& k, const torch::Tensor& v) {
  const auto codec = codec_of(rival);
  const auto k_read = codec->key.other(k), v_read = codec->value.other(v);
  auto coded = torch::zeros({kTokens, kTokens}, torch::kBool);
  const int64_t sink = rival.sink_tokens, tile = rival.tile_tokens;
  for (int64_t i = 0; i < kTokens; ++i) {  // whole tiles that have left the recent window
    const int64_t gone = std::max<int64_t>(0, i + 1 - rival.recent_tokens - sink) / tile * tile;
    coded[i].slice(0, sink, sink + gone).fill_(true);
  }
  const auto scores = [&](const torch::Tensor& keys) {
    return torch::matmul(q.to(torch::kFloat64), keys.to(torch::kFloat64).transpose(2, 3)) * kScale;
  };
  const auto hidden = torch::ones({kTokens, kTokens}, torch::kBool).triu(1);
  const auto p =
      torch::where(coded, scores(k_read), scores(k)).masked_fill(hidden, -INFINITY).softmax(-1);
  return torch::matmul(p * coded, v_read.to(torch::kFloat64)) +
         torch::matmul(p * coded.logical_not(), v.to(torch::kFloat64));
}

TEST(RivalMethods, QueriesReadWhatTheCodecKeepsAndNothingElse) {
  torch::manual_seed(5);
  const auto q = random_rows(), k = random_rows(), v = random_rows();
  for (const RivalFormat& rival : oscar::rival_formats()) {
    oscar::Int2Attention engine({codec_of(rival)}, view_of(rival), {0});
    const auto out = engine.attend(0, q, k, v, kScale).to(torch::kFloat64);
    const auto expected = plain_attention(rival, q, k, v);
    EXPECT_LE((out - expected).abs().max().item<double>(), 1e-4) << rival.name;
    // And in pieces, as answers are generated: of scales of a whole sequence only the last piece.
    engine.keep_cache(kTokens);
    torch::Tensor last;
    for (const auto& [begin, end] :
         {std::pair<int64_t, int64_t>{0, 190}, {190, 191}, {191, 290}, {290, kTokens}}) {
      last = engine.attend(0, q.slice(2, begin, end), k.slice(2, begin, end),
                           v.slice(2, begin, end), kScale);
    }
    const auto tail = expected.slice(2, 290);
    EXPECT_LE((last - tail).abs().max().item<double>(), 1e-4) << rival.name << " in pieces";
  }
}

TEST(RivalMethods, EachKeepsTheWindowsAndLayersThatItIsShippedWith) {
  const TinyModel tiny;
  const auto coded = [](const Method& method) {
    return std::ranges::count_if(method.layers, [](const auto& layer) { return layer != nullptr; });
  };
  const auto expect = [&](const char* name, int64_t sink, int64_t recent, int64_t tile,
                          int64_t layers) {
    const Method method = method_of(tiny, name);
    EXPECT_EQ(method.view.sink, sink) << name;
    EXPECT_EQ(method.view.recent, recent) << name;
    EXPECT_EQ(method.view.demote_block, tile) << name;
    EXPECT_EQ(coded(method), layers) << name;
  };
  expect("fp8", 0, 0, 1, 8);
  expect("kivi-2", 0, 128, 32, 8);
  expect("kvarn-k4v2", 128, 1, 128, 8);
  expect("turboquant-4", 0, 0, 1, 4);
  expect("turboquant-4@common", 64, 256, 1, 8);
  expect("kivi-2@common", 64, 256, 32, 8);
  expect("turboquant-3@window:8/16", 8, 16, 1, 4);
  expect("q8_0@layer:3@k", 0, 0, 1, 1);
  EXPECT_FALSE(method_of(tiny, "q8_0@k").layers[3]->int2_values);
}

TEST(RivalMethods, BitsAreThoseOfTheirFormats) {
  const TinyModel tiny;
  const auto expect = [&](const char* name, double key, double value) {
    EXPECT_DOUBLE_EQ(method_of(tiny, name).key_bits, key) << name;
    EXPECT_DOUBLE_EQ(method_of(tiny, name).value_bits, value) << name;
  };
  expect("fp8-per-token-head", 8.25, 8.25);
  expect("int4-per-token-head", 4.25, 4.25);
  expect("turboquant-3", 3.125, 3.25);
  expect("turboquant-k8v4", 8, 4.25);
  expect("kvarn-k4v2", 4 + 16.0 * (2 * 128 + 128) / (128 * 128),
         2 + 16.0 * (128 + 256) / (128 * 128));
  expect("kivi-2", 2 + 32 / 32.0, 2 + 32 / 32.0);
  expect("q4_0", 4 + 16 / 32.0, 4 + 16 / 32.0);
  expect("nvfp4", 4 + 8 / 16.0, 4 + 8 / 16.0);
  expect("bundle", 2.25, 2.25);
  expect("bundle@bits:4/2", 4.25, 2.25);
  expect("exact", 16, 16);
}

TEST(RivalMethods, WiderCodesAreNotClippedUnlessAsked) {
  const TinyModel tiny;
  const auto ratios = [&](const char* name) {
    const auto layer = method_of(tiny, name).layers[0];
    return std::pair(layer->key.recipe.clip_ratio[0], layer->value.recipe.clip_ratio[0]);
  };
  EXPECT_EQ(ratios("hadamard-clip@bits:4/2"), std::pair(0.0f, 0.92f));
  EXPECT_EQ(ratios("hadamard-clip@bits:3/3@clip:0.98/0.97"), std::pair(0.98f, 0.97f));
}

TEST(RivalMethods, OtherEnginesLeaveThemToTheBlockWiseForward) {
  const TinyModel tiny;
  for (const char* name : {"fp8", "exact", "bundle@bits:4/4", "bundle@bits:2/3"}) {
    EXPECT_FALSE(runs_in(method_of(tiny, name), oscar::EngineKind::kReference)) << name;
    EXPECT_TRUE(runs_in(method_of(tiny, name), oscar::EngineKind::kSimulate)) << name;
  }
  EXPECT_TRUE(runs_in(method_of(tiny, "bundle"), oscar::EngineKind::kReference));
  EXPECT_TRUE(runs_in(method_of(tiny, "bundle@bits:2/2"), oscar::EngineKind::kReference));
}

}  // namespace
