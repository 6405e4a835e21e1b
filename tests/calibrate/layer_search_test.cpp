// The search finds what was planted, and believes nothing that the confirmation half denies.
#include "oscar/calibrate/layer_search.h"

#include <gtest/gtest.h>

#include "oscar/calibrate/collector.h"
#include "oscar/int2/int2_attention.h"

namespace {

using namespace oscar;

constexpr int kHeads = 2, kGroup = 2, kDim = 32;
constexpr int64_t kTokens = 300;
constexpr LayerGeometry kGeometry{.layer_id = 1,
                                  .attention = AttentionKind::kFull,
                                  .sliding_window = 0,
                                  .num_qo_heads = kHeads * kGroup,
                                  .num_kv_heads = kHeads,
                                  .head_dim_k = kDim,
                                  .head_dim_v = kDim,
                                  .quantized = true};
const QuantizerSettings kQuantizer{.quant_group_size = kDim, .sink_tokens = 4, .recent_tokens = 16};

HeldChunk random_chunk(uint64_t seed) {
  torch::manual_seed(seed);
  return {torch::randn({kHeads * kGroup, kTokens, kDim}), torch::randn({kHeads, kTokens, kDim}),
          torch::randn({kHeads, kTokens, kDim})};
}

torch::Tensor output_metric() {
  torch::manual_seed(5);
  const auto w = torch::randn({kHeads * kGroup, kDim, 48});
  return torch::matmul(w, w.transpose(1, 2));
}

LayerStatistics statistics_of(const std::vector<HeldChunk>& chunks) {
  MomentCollector collector(kGeometry, torch::kCPU);
  for (const HeldChunk& c : chunks) {
    collector.observe({.layer = 1,
                       .q = c.q.unsqueeze(0),
                       .k = c.k.unsqueeze(0),
                       .v = c.v.unsqueeze(0),
                       .o = c.q.unsqueeze(0)});
  }
  LayerStatistics s = collector.result();
  const auto metric = output_metric().view({kHeads, kGroup, kDim, kDim}).sum(1);
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kDim * kDim; ++i) {
      s.o_proj_metric[h].data()[i] = metric[h].contiguous().data_ptr<float>()[i];
    }
  }
  return s;
}

// With its inputs, which the search only refers to.
struct Search {
  FitOptions fixed;
  SearchOptions options;
  HeldBackLayer held;
  LayerStatistics statistics = statistics_of({random_chunk(1), random_chunk(2), random_chunk(3)});
  Rope rope;

  LayerChoice run() const {
    return search_layer({.statistics = statistics,
                         .fixed = fixed,
                         .search = options,
                         .rope = rope,
                         .quantizer = kQuantizer,
                         .seed = 7,
                         .output_metric = output_metric()},
                        held);
  }
};

Search random_search() {
  Search search;
  search.fixed = {.kind = TransformKind::kHadamard, .clip_k = 0.96, .clip_v = 0.96};
  search.held.search = {random_chunk(10), random_chunk(11)};
  search.held.confirm = {random_chunk(12), random_chunk(13)};
  return search;
}

// Loss over energy of a finished layer on `chunks`, by the engine that evaluation uses.
std::vector<double> engine_nmse(const LayerTransforms& layer,
                                const std::vector<HeldChunk>& chunks) {
  const auto codec = std::make_shared<LayerCodec>();
  codec->key = make_side_codec(layer.key, CacheSide::kKey, kQuantizer, 1, torch::kCPU);
  codec->value = make_side_codec(layer.value, CacheSide::kValue, kQuantizer, 1, torch::kCPU);
  const CacheView view{.sink = kQuantizer.sink_tokens, .recent = kQuantizer.recent_tokens};
  std::vector<double> error(kHeads, 0.0), energy(kHeads, 0.0);
  for (const HeldChunk& c : chunks) {
    const auto attend = [&](const std::shared_ptr<LayerCodec>& used) {
      Int2Attention engine({used}, view, {0});
      return engine
          .attend(0, c.q.unsqueeze(0), c.k.unsqueeze(0), c.v.unsqueeze(0),
                  1 / std::sqrt(double{kDim}))
          .squeeze(0)
          .slice(1, view.sink + view.recent)
          .to(torch::kFloat64);
    };
    const auto exact = attend(nullptr), rounded = attend(codec);
    const auto metric = output_metric().to(torch::kFloat64);
    const auto weigh = [&](const torch::Tensor& x) {
      return torch::matmul(x, metric).mul(x).sum({1, 2}).view({kHeads, kGroup}).sum(1);
    };
    const auto e = weigh(rounded - exact), o = weigh(exact);
    for (int h = 0; h < kHeads; ++h) {
      error[h] += e[h].item<double>();
      energy[h] += o[h].item<double>();
    }
  }
  for (int h = 0; h < kHeads; ++h) error[h] /= energy[h];
  return error;
}

TEST(LayerSearch, ReplacesAClippingRatioThatIsClearlyWrong) {
  Search search = random_search();
  search.fixed.clip_k = search.fixed.clip_v = 0.4;  // most of every row is cut off
  search.options.clip = true;
  const LayerChoice choice = search.run();
  for (const SideTransform* side : {&choice.layer.key, &choice.layer.value}) {
    for (const float ratio : side->clip_ratio) EXPECT_TRUE(ratio == 0 || ratio >= 0.90f) << ratio;
  }
  Search none = search;
  none.options = {};
  const LayerChoice fixed = none.run();
  EXPECT_FLOAT_EQ(fixed.layer.key.clip_ratio[0], 0.4f);
  for (int h = 0; h < kHeads; ++h) {
    EXPECT_LT(choice.layer.predicted_output_nmse[h], 0.7 * fixed.layer.predicted_output_nmse[h]);
  }
}

TEST(LayerSearch, FullEffortSearchesLowerRatiosToo) {
  Search search = random_search();
  search.options.clip = search.options.full = true;
  const Json record = search.run().layer.search;
  // Of 32 magnitudes .94 to .96 clip at the same one as the default, and .97 and above at none.
  EXPECT_EQ(record["key"]["stages"][0]["variants"],
            Json({"before", "0.80", "0.84", "0.88", "0.92", "0.97"}));
}

// In the search half nobody looks at the four channels with the outliers, so clipping them pays; in
// the confirmation half nobody looks at anything else.
TEST(LayerSearch, ConfirmationRejectsAnOverfitChoice) {
  Search search = random_search();
  search.fixed = {.kind = TransformKind::kIdentity, .clip_k = 0, .clip_v = 0};
  search.options = {.clip = true, .full = true};
  const auto with_outliers = [](uint64_t seed, bool seen) {
    HeldChunk chunk = random_chunk(seed);
    chunk.k.narrow(2, 0, 4).mul_(8.0f);
    (seen ? chunk.q.narrow(2, 4, kDim - 4) : chunk.q.narrow(2, 0, 4)).zero_();
    return chunk;
  };
  search.held.search = {with_outliers(10, false), with_outliers(11, false)};
  search.held.confirm = {with_outliers(12, false), with_outliers(13, false)};
  const LayerChoice agreed = search.run();
  for (const float ratio : agreed.layer.key.clip_ratio) {
    EXPECT_TRUE(ratio > 0 && ratio < 0.9f) << "the planted gain was not found: " << ratio;
  }
  search.held.confirm = {with_outliers(12, true), with_outliers(13, true)};
  const LayerChoice denied = search.run();
  for (const float ratio : denied.layer.key.clip_ratio) EXPECT_EQ(ratio, 0.0f);
  EXPECT_FALSE(denied.layer.search["key"]["heads"][0]["confirmed"][0]["accepted"].get<bool>());
}

TEST(LayerSearch, FindsTheKindThatSpreadsOutliersAndTheWriterThatHelps) {
  Search search = random_search();
  const auto planted = [](uint64_t seed) {
    HeldChunk chunk = random_chunk(seed);
    const auto scale = torch::linspace(-1.5, 1.5, kDim).exp();
    chunk.k.mul_(scale).add_(3.0f);
    chunk.q.div_(scale);
    chunk.v.mul_(scale);
    return chunk;
  };
  search.statistics = statistics_of({planted(1), planted(2), planted(3)});
  search.held.search = {planted(10), planted(11)};
  search.held.confirm = {planted(12), planted(13)};
  search.options = {.kind = true, .center = true, .rounding = true, .scale_correction = true};
  const LayerChoice choice = search.run();
  for (int h = 0; h < kHeads; ++h) {
    EXPECT_EQ(choice.layer.key.kind[h], TransformKind::kBalanced);
    EXPECT_NE(choice.layer.key.mean[h].norm(), 0.0f);
  }
  search.options = {.kind = true, .center = true};
  const LayerChoice plain_writer = search.run();
  search.options = {};
  const LayerChoice fixed = search.run();
  for (int h = 0; h < kHeads; ++h) {
    const double found = choice.layer.predicted_output_nmse[h];
    EXPECT_LT(found, 0.8 * fixed.layer.predicted_output_nmse[h]);
    EXPECT_LT(found, 0.9 * plain_writer.layer.predicted_output_nmse[h]) << "the writer's share";
  }
}

TEST(LayerSearch, PredictsTheErrorThatTheEngineMakes) {
  Search search = random_search();
  search.fixed.kind = TransformKind::kBalanced;
  search.fixed.center = true;
  search.fixed.rounding = Rounding::kShaped;
  search.fixed.scale_correction = ScaleCorrection::kMetric;
  search.options = {.kind = true, .center = true, .granularity = true, .clip = true, .full = true};
  const LayerChoice choice = search.run();
  for (const LayerTransforms* layer :
       {&choice.layer, &choice.portable.shared, &choice.portable.per_head}) {
    const auto expected = engine_nmse(*layer, search.held.confirm);
    for (int h = 0; h < kHeads; ++h) {
      EXPECT_NEAR(layer->predicted_output_nmse[h], expected[h], 2e-3 * expected[h]);
    }
  }
}

TEST(LayerSearch, ThePortableVariantIsOrthogonalPlainUncentredWithOneClipPair) {
  Search search = random_search();
  search.fixed = {.kind = TransformKind::kBalanced, .center = true, .rounding = Rounding::kShaped};
  const LayerChoice choice = search.run();
  for (const LayerTransforms* layer : {&choice.portable.shared, &choice.portable.per_head}) {
    for (const SideTransform* side : {&layer->key, &layer->value}) {
      EXPECT_TRUE(side->partner.empty() && side->metric.empty() && side->feedback.empty());
      EXPECT_EQ(side->clip_ratio[0], side->clip_ratio[1]);
      EXPECT_EQ(side->scale_correction[0], ScaleCorrection::kNone);
      for (const float entry : side->mean.data) EXPECT_EQ(entry, 0.0f);
    }
  }
  EXPECT_EQ(choice.portable.shared.key.forward[0], choice.portable.shared.key.forward[1]);
}

TEST(LayerSearch, RepeatsItselfToTheBit) {
  Search search = random_search();
  search.options = {.kind = true, .granularity = true, .clip = true};
  const LayerChoice one = search.run(), two = search.run();
  EXPECT_EQ(one.layer.search, two.layer.search);
  EXPECT_EQ(one.layer.key.forward, two.layer.key.forward);
  EXPECT_EQ(one.layer.predicted_output_nmse, two.layer.predicted_output_nmse);
}

TEST(LossTable, DifferencesCarryTheSpreadOverSamples) {
  LossTable table{
      .pairings = 2, .heads = 1, .samples = 4, .sums = {5, 6, 7, 8, 4, 6, 5, 7}, .energy = {}};
  const LossDifference d = compare(table, 1, 0, 0);
  EXPECT_DOUBLE_EQ(d.difference, -4);
  // Differences -1, 0, -2, -1: variance 2/3, of a sum of four 8/3.
  EXPECT_DOUBLE_EQ(d.standard_error, std::sqrt(8.0 / 3));
  EXPECT_TRUE(d.better());
  EXPECT_FALSE(compare(table, 0, 1, 0).better());
  table.samples = 1;
  table.sums = {2, 1};
  EXPECT_FALSE(compare(table, 1, 0, 0).better()) << "one sample says nothing about its spread";
}

}  // namespace
