// The one pair of clipping ratios for many layers.
#include "oscar/stacks/pooled_clips.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "stacks/plain_bundle.h"

namespace oscar {
namespace {

using plain::clip_losses;
using plain::plain_bundle;

TEST(PooledClips, LayersThatDisagreeGetThePairOfLeastSummedLoss) {
  const Bundle bundle = plain_bundle();
  const PooledClips pooled =
      pool_clips({&bundle.portable[0].shared, &bundle.portable[1].shared}, false);
  EXPECT_DOUBLE_EQ(pooled.pair.key, 0.93);  // 8 against 12 with either layer's own
  EXPECT_DOUBLE_EQ(pooled.pair.value, 0.92);
  EXPECT_DOUBLE_EQ(pooled.loss_factor.value(), (16.0 + 8.0) / (12.0 + 8.0));  // two heads each
}

// To four digits 0.93 and 0.94 lose the same.
TEST(PooledClips, LossesDecideInFullPrecision) {
  Bundle bundle = plain_bundle();
  for (auto& layer : bundle.portable) {
    layer.shared.key.recipe.clip_ratio = {0.96F, 0.93F};
    layer.shared.key.clip_losses =
        clip_losses({{0.96F, 9}, {0.93F, 0.0123421}, {0.94F, 0.0123419}});
  }
  const PooledClips pooled =
      pool_clips({&bundle.portable[0].shared, &bundle.portable[1].shared}, false);
  EXPECT_DOUBLE_EQ(pooled.pair.key, 0.94);
}

TEST(PooledClips, ATieGoesToWhatTheSearchBeganWith) {
  Bundle bundle = plain_bundle();
  for (auto& layer : bundle.portable) {
    layer.shared.key.recipe.clip_ratio = {0.96F, 0.93F};
    layer.shared.key.clip_losses = clip_losses({{0.95F, 1}, {0.93F, 1}, {0.96F, 1}});
  }
  const PooledClips pooled =
      pool_clips({&bundle.portable[0].shared, &bundle.portable[1].shared}, false);
  EXPECT_DOUBLE_EQ(pooled.pair.key, 0.95);
}

TEST(PooledClips, ABundlesOwnHeadsGetOnePairForTheModelOrForEachLayer) {
  Bundle bundle = plain_bundle();
  for (int id = 0; id < 2; ++id) {
    bundle.layers[id].key.clip_losses = bundle.portable[id].shared.key.clip_losses;
    bundle.layers[id].value.clip_losses = bundle.portable[id].shared.value.clip_losses;
    bundle.layers[id].key.recipe.clip_ratio = {id == 0 ? 0.96F : 0.90F, 0.93F};
  }
  Bundle by_layer = bundle, by_head = bundle;
  const auto model = pool_own_clips(bundle, ClipScope::kModel);
  ASSERT_EQ(model.size(), 1u);
  EXPECT_EQ(model[0].layers, 2u);
  // Keys have 4 in every head with .93; their own ratios gave 3 and 4. Values stay at 2.
  const double factor = (4 * 4.0 + 4 * 2.0) / (2 * 3.0 + 2 * 4.0 + 4 * 2.0);
  EXPECT_EQ(model[0].clips.pair, (ClipPair{0.93, 0.92}));
  EXPECT_DOUBLE_EQ(model[0].clips.loss_factor.value(), factor);
  for (const LayerTransforms& layer : bundle.layers) {
    EXPECT_EQ(layer.key.recipe.clip_ratio, (std::vector<float>{0.93F, 0.93F}));
    EXPECT_DOUBLE_EQ(layer.predicted_output_nmse[1], 0.01 * factor);
  }
  const auto layers = pool_own_clips(by_layer, ClipScope::kLayer);
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_EQ(layers[0].clips.pair, (ClipPair{0.96, 0.92}));
  EXPECT_EQ(layers[1].first_layer, 1);
  EXPECT_EQ(layers[1].clips.pair, (ClipPair{0.9, 0.92}));
  EXPECT_EQ(by_layer.layers[1].key.recipe.clip_ratio, (std::vector<float>{0.90F, 0.90F}));
  EXPECT_TRUE(pool_own_clips(by_head, ClipScope::kHead).empty());
  EXPECT_EQ(by_head.layers[0].key.recipe.clip_ratio, (std::vector<float>{0.96F, 0.93F}));
}

TEST(PooledClips, TheRecordHoldsDecimalRatiosAndNullForAnUnknownCost) {
  const Json record = pooled_clip_record(
      {{.first_layer = 0, .layers = 2, .clips = {.pair = {0.93, 0.92}, .loss_factor = 1.25}},
       {.first_layer = 2, .layers = 1, .clips = {.pair = {}, .loss_factor = {}}}});
  EXPECT_EQ(record.dump(),
            R"([{"first_layer":0,"layers":2,"clip":[0.93,0.92],"loss_factor":1.25},)"
            R"({"first_layer":2,"layers":1,"clip":[0.96,0.92],"loss_factor":null}])");
}

TEST(PooledClips, LayersThatAgreeKeepTheirPairWithoutLosses) {
  const Bundle bundle = plain_bundle();
  const PooledClips pooled = pool_clips({&bundle.layers[0], &bundle.layers[1]}, false);
  EXPECT_EQ(pooled.pair, (ClipPair{0.96, 0.92}));
  EXPECT_EQ(pooled.loss_factor, 1.0);
}

TEST(PooledClips, LossesThatDoNotTellGiveThePublishedPairAndNoCost) {
  const auto expect_unknown = [](const std::function<void(SideTransform&)>& change) {
    Bundle bundle = plain_bundle();
    change(bundle.portable[1].shared.key);
    for (const bool one_ratio : {false, true}) {
      const PooledClips pooled =
          pool_clips({&bundle.portable[0].shared, &bundle.portable[1].shared}, one_ratio);
      EXPECT_EQ(pooled.pair,
                (ClipPair{kPublishedClipK, one_ratio ? kPublishedClipK : kPublishedClipV}));
      EXPECT_FALSE(pooled.loss_factor.has_value());
    }
  };
  expect_unknown([](SideTransform& side) { side.clip_losses.reset(); });  // an older file
  // Of a ratio that a head has, but was not tried with; of none that the layers share.
  expect_unknown([](SideTransform& side) { side.recipe.clip_ratio[1] = 0.5F; });
  expect_unknown([](SideTransform& side) {
    side.clip_losses = clip_losses({{0.91F, 1}, {0.89F, 2}});
    side.recipe.clip_ratio = {0.91F, 0.89F};
  });
}

TEST(PooledClips, WhatPoolingCostsUnknownlyIsNoLongerPredicted) {
  Bundle bundle = plain_bundle();
  bundle.layers[0].key.recipe.clip_ratio[1] = 0.5F;
  pool_own_clips(bundle, ClipScope::kLayer);
  EXPECT_TRUE(std::isnan(bundle.layers[0].predicted_output_nmse[0]));
  EXPECT_EQ(bundle.layers[1].predicted_output_nmse[0], 0.01);
}

TEST(PooledClips, OneRatioForBothSidesIsOneThatBothWereTriedWith) {
  Bundle bundle = plain_bundle();
  for (auto& layer : bundle.portable) {
    layer.shared.value.clip_losses = clip_losses({{0.92F, 1}, {0.93F, 2}, {0.90F, 2}});
  }
  const PooledClips pooled =
      pool_clips({&bundle.portable[0].shared, &bundle.portable[1].shared}, true);
  EXPECT_EQ(pooled.pair, (ClipPair{0.93, 0.93}));
}

}  // namespace
}  // namespace oscar
