// What the search measures equals what the INT2 engine does, query by query.
#include "oscar/attention/attention_probe.h"

#include <gtest/gtest.h>

#include "oscar/attention/int2_attention.h"

namespace {

using oscar::AttentionProbe;
using oscar::CacheView;
using oscar::Int2Rows;
using oscar::LayerCodec;
using oscar::ScaleCorrection;
using oscar::SideCodec;

constexpr int64_t kTokens = 400, kHeads = 2, kGroup = 3, kDim = 16;
constexpr double kProbeScale = 0.3;

struct Sequence {
  torch::Tensor q, k, v, metric;  // one sequence, heads first
};

Sequence random_sequence() {
  torch::manual_seed(3);
  const auto w = torch::randn({kHeads * kGroup, kDim, 40});
  return {torch::randn({kHeads * kGroup, kTokens, kDim}),
          torch::randn({kHeads, kTokens, kDim}) + 1.0, torch::randn({kHeads, kTokens, kDim}),
          torch::matmul(w, w.transpose(1, 2))};
}

std::shared_ptr<LayerCodec> probe_codec() {
  const auto codec = std::make_shared<LayerCodec>();
  for (auto* side : {&codec->key, &codec->value}) {
    side->forward = torch::eye(kDim) + 0.1 * torch::randn({kHeads, kDim, kDim});
    side->mean = torch::randn({kHeads, kDim});
    side->recipe = oscar::SideRecipe(kHeads, {.clip_ratio = 0.95f});
    side->format.quant_group_size = kDim;
  }
  codec->key.partner = torch::linalg_inv(codec->key.forward).transpose(1, 2).contiguous();
  codec->value.partner = torch::linalg_inv(codec->value.forward).contiguous();
  return codec;
}

Int2Rows int2_rows(const SideCodec& side, const torch::Tensor& x, bool of_keys) {
  const auto exact = to_cache_basis(side, x.unsqueeze(0));
  const auto rounded = quantize_dequantize(side, exact, "test");
  return {(of_keys ? rounded : torch::matmul(rounded - exact, side.partner)).squeeze(0),
          side.partner, side.mean};
}

// o^ - o of the engine for every query, [Hq, tokens, d].
torch::Tensor engine_error(const Sequence& s, const CacheView& view, LayerCodec codec, bool keys,
                           bool values) {
  codec.int2_keys = keys;
  codec.int2_values = values;
  const auto attend = [&](const std::shared_ptr<LayerCodec>& c) {
    oscar::Int2Attention engine({c}, view, {static_cast<int>(view.sliding_window)});
    return engine.attend(0, s.q.unsqueeze(0), s.k.unsqueeze(0), s.v.unsqueeze(0), kProbeScale)
        .squeeze(0);
  };
  return attend(std::make_shared<LayerCodec>(codec)) - attend(nullptr);
}

void expect_the_engines_errors(const CacheView& view, const std::vector<int64_t>& positions) {
  const Sequence s = random_sequence();
  const auto codec = probe_codec();
  const auto index = torch::tensor(positions, torch::kInt64);
  const AttentionProbe probe(view, positions, s.q.index_select(1, index), s.k, s.v, s.metric,
                             kProbeScale);
  const auto keys = int2_rows(codec->key, s.k, true), values = int2_rows(codec->value, s.v, false);
  const auto key_weights = probe.weights(keys);
  const auto of_keys = probe.key_error(key_weights);
  const auto of_values = probe.value_error(probe.int2_part(probe.exact_weights()), values);
  const auto of_both = probe.pair_error(key_weights, values);
  const auto check = [&](const torch::Tensor& got, bool k, bool v, const char* what) {
    const auto expected = engine_error(s, view, *codec, k, v).index_select(1, index);
    const auto ours = got.view({kHeads * kGroup, -1, kDim});
    EXPECT_GT(expected.abs().max().item<double>(), 1e-2) << what;
    EXPECT_LT((ours - expected).abs().max().item<double>(), 2e-5) << what;
    const auto weighted = torch::matmul(expected.to(torch::kFloat64), s.metric.to(torch::kFloat64));
    const auto loss = (weighted * expected).sum(-1).view({kHeads, kGroup, -1}).sum(1);
    EXPECT_LT((probe.loss(got) - loss).abs().max().item<double>(), 1e-4 * loss.max().item<double>())
        << what;
  };
  check(of_keys, true, false, "keys");
  check(of_values, false, true, "values");
  check(of_both, true, true, "both");
}

TEST(AttentionProbe, MakesTheErrorsOfTheEngine) {
  expect_the_engines_errors({.sink = 4, .recent = 20}, {30, 31, 90, 200, 399});
  expect_the_engines_errors({.sink = 0, .recent = 1}, {1, 5, 250});
  expect_the_engines_errors({.sink = 4, .recent = 20, .demote_block = 64}, {100, 220, 398});
  expect_the_engines_errors({.sink = 4, .recent = 20, .sliding_window = 60}, {50, 220, 330});
}

TEST(AttentionProbe, AGateWeighsTheErrorOfEachTokenBeforeTheProjection) {
  const Sequence s = random_sequence();
  const auto codec = probe_codec();
  const std::vector<int64_t> positions = {30, 90, 200, 399};
  const auto index = torch::tensor(positions, torch::kInt64);
  const auto gate = torch::rand({kHeads * kGroup, kTokens, kDim}).index_select(1, index);
  const auto probe = [&](const torch::Tensor& of) {
    return AttentionProbe({.sink = 4, .recent = 20}, positions, s.q.index_select(1, index), s.k,
                          s.v, s.metric, kProbeScale, of);
  };
  const AttentionProbe gated = probe(gate), plain = probe({});
  const auto error = plain.key_error(plain.weights(int2_rows(codec->key, s.k, true)));
  // |(e s) W|^2 of each query, with a square root of the metric for W.
  const auto metric = s.metric.to(torch::kFloat64);
  const auto e = error.view({kHeads * kGroup, -1, kDim}).to(torch::kFloat64) * gate;
  const auto loss =
      torch::matmul(e, torch::linalg_cholesky(metric)).square().sum(-1).view({kHeads, kGroup, -1});
  EXPECT_LT((gated.loss(error) - loss.sum(1)).abs().max().item<double>(),
            1e-4 * loss.max().item<double>());
  EXPECT_GT((plain.loss(error) - loss.sum(1)).abs().max().item<double>(),
            0.1 * loss.max().item<double>());
  EXPECT_LT(gated.energy().sum().item<double>(), 0.7 * plain.energy().sum().item<double>());
}

TEST(AttentionProbe, QueriesWithinTheWindowsSeeNoDifference) {
  const Sequence s = random_sequence();
  const auto codec = probe_codec();
  const std::vector<int64_t> positions = {2, 9, 22};
  const AttentionProbe probe({.sink = 4, .recent = 20}, positions,
                             s.q.index_select(1, torch::tensor(positions, torch::kInt64)), s.k, s.v,
                             s.metric, kProbeScale);
  EXPECT_EQ(probe.first_int2(), probe.end_int2());
  const auto weights = probe.weights(int2_rows(codec->key, s.k, true));
  EXPECT_EQ(probe.loss(probe.key_error(weights)).max().item<double>(), 0.0);
}

}  // namespace
