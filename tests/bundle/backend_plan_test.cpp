#include "oscar/bundle/backend_plan.h"

#include <gtest/gtest.h>
#include <cmath>
#include <functional>
#include <sstream>

#include "bundle/plain_bundle.h"

namespace oscar {

// What each backend runs of a bundle.

namespace {

using plain::kHeads;
using plain::plain_bundle;

BackendPlan plan_of(const char* name, const Bundle& bundle) {
  return plan_for(find_backend(name), bundle);
}

std::string line_of(const BackendPlan& plan) { return plans_json({plan})[0]["line"]; }

ObstacleKind kind_of(const BackendPlan& plan) { return plan.obstacles.at(0).kind; }

Bundle fp32_bundle() {
  Bundle bundle = plain_bundle();
  bundle.quantizer.metadata_dtype = MetadataDtype::kFp32;
  return bundle;
}

// What one change of a bundle that runs as it is makes of sglang-v1's plan.
BackendPlan changed(const std::function<void(Bundle&)>& change) {
  Bundle bundle = fp32_bundle();
  change(bundle);
  return plan_of("sglang-v1", bundle);
}

void center(Bundle& bundle) { bundle.layers[1].value.mean[0](3) = 1; }

TEST(BackendPlan, PlainRowsInFp32RunAsTheyAreOnSglang) {
  const Bundle bundle = fp32_bundle();
  for (const char* name : {"sglang-v1", "sglang-v2", "sglang-0c88a"}) {
    const BackendPlan plan = plan_of(name, bundle);
    EXPECT_EQ(plan.verdict(), BackendVerdict::kAsIs);
    EXPECT_TRUE(plan.obstacles.empty());
    EXPECT_EQ(plan.run->clips.scope, ClipScope::kModel);
    EXPECT_EQ(plan.run->clips.pair, (ClipPair{0.96, 0.92}));
    EXPECT_EQ(plan.run->format, bundle.quantizer.row_format());
    EXPECT_EQ(plan.run->packing, PackOrder::kQuartered);
    EXPECT_EQ(plan.run->relative_error, 1.0);
    EXPECT_EQ(line_of(plan), "runs as is");
  }
  EXPECT_EQ(plan_of("vllm-pr46774", bundle).verdict(), BackendVerdict::kPortable);  // another zero
}

TEST(BackendPlan, RowsInAnotherCodecRunAsTheyAreWhereThatIsTheCodec) {
  Bundle bundle = plain_bundle();
  bundle.quantizer.rules.zero = ZeroForm::kMinimum;
  EXPECT_EQ(plan_of("vllm-pr46774", bundle).verdict(), BackendVerdict::kAsIs);
  EXPECT_EQ(plan_of("onnxruntime", bundle).verdict(), BackendVerdict::kPortable);
  const BackendPlan plan = plan_of("oscar_int2", bundle);
  EXPECT_EQ(kind_of(plan), ObstacleKind::kCodec);
  EXPECT_NE(plan.obstacles[0].text.find("not the row's minimum"), std::string::npos);
}

// The codec that a server runs, whatever the bundle was fitted for.
TEST(BackendPlan, ThePortableVariantComesInTheBackendsOwnRows) {
  Bundle bundle = plain_bundle();
  const RowFormat vllm = plan_of("vllm-pr46774", bundle).run->format.value();
  EXPECT_EQ(vllm, (RowFormat{.quant_group_size = plain::kHeadDim,
                             .metadata = MetadataDtype::kFp16,
                             .rules = {.zero = ZeroForm::kMinimum}}));
  const RowFormat sglang = plan_of("sglang-v1", bundle).run->format.value();
  EXPECT_EQ(sglang.metadata, MetadataDtype::kFp16);  // which it has, rounded later
  EXPECT_EQ(sglang.rules.metadata_rounding, MetadataRounding::kAfterCoding);
  bundle.quantizer.metadata_dtype = MetadataDtype::kBf16;
  const RowFormat onnx = plan_of("onnxruntime", bundle).run->format.value();
  EXPECT_EQ(onnx.metadata, MetadataDtype::kFp32);  // its first, as it has no bf16
  bundle.quantizer.quant_group_size = 32;
  const RowFormat mlx = plan_of("mlx", bundle).run->format.value();
  EXPECT_EQ(mlx.quant_group_size, 32);
  EXPECT_EQ(mlx.rules.clip_span, ClipSpan::kQuantGroup);
}

TEST(BackendPlan, EveryRunSaysItsRowsOrHasLevelsOfItsOwn) {
  Bundle bundle = plain_bundle();
  bundle.model.head_dim_k = bundle.model.head_dim_v = bundle.quantizer.quant_group_size = 128;
  for (const BackendPlan& plan : plan_for_all(bundle)) {
    ASSERT_TRUE(plan.run) << plan.backend->name;
    EXPECT_EQ(plan.run->format.has_value(), !plan.backend->own_levels) << plan.backend->name;
    EXPECT_NE(plan.run->relative_error.has_value(), plan.run->unknown.has_value());
    const bool one_pair =
        plan.backend->clip == ClipScope::kModel || plan.backend->clip == ClipScope::kModelBoth;
    EXPECT_EQ(plan.run->clips.pair.has_value(), one_pair) << plan.backend->name;
  }
}

TEST(BackendPlan, WhateverABackendLacksIsNamed) {
  const auto expect_lack = [](ObstacleKind kind, const std::string& reason,
                              const std::function<void(Bundle&)>& change) {
    const BackendPlan plan = changed(change);
    EXPECT_EQ(plan.verdict(), BackendVerdict::kPortable);
    EXPECT_EQ(kind_of(plan), kind) << reason;
    EXPECT_EQ(plans_json({plan})[0]["reason"], reason);
  };
  expect_lack(ObstacleKind::kMean, "values are centered (layer 1)", center);
  expect_lack(ObstacleKind::kMean, "keys have two centers (layer 1)", [](Bundle& b) {
    MatrixStack<float>& centers = b.layers[1].key.centers;
    centers = MatrixStack<float>(b.layers[1].key.forward.count, 2, b.layers[1].key.forward.cols);
    centers.data[0] = 1;
  });
  expect_lack(ObstacleKind::kHeadsDiffer, "heads of keys differ (layer 0)",
              [](Bundle& b) { b.layers[0].key.forward[1](0, 0) = -1; });
  expect_lack(ObstacleKind::kShapedRounding, "rounding is shaped (layer 0)",
              [](Bundle& b) { b.layers[0].key.recipe.rounding[1] = Rounding::kShaped; });
  expect_lack(ObstacleKind::kScaleCorrection, "scales are corrected (layer 0)", [](Bundle& b) {
    b.layers[0].key.recipe.scale_correction[1] = ScaleCorrection::kMetric;
  });
  expect_lack(ObstacleKind::kClipRatios, "it has fewer clipping ratios",
              [](Bundle& b) { b.layers[1].key.recipe.clip_ratio[0] = 0.5F; });
  expect_lack(ObstacleKind::kCodec, "it rounds scale and zero to fp16 after coding, not before",
              [](Bundle& b) { b.quantizer.metadata_dtype = MetadataDtype::kFp16; });
  Bundle balanced = plain_bundle();
  balanced.layers[1].key.kind[1] = TransformKind::kBalanced;
  EXPECT_EQ(kind_of(plan_of("vllm-pr46774", balanced)), ObstacleKind::kPartner);
}

TEST(BackendPlan, LayersThatHoldNo2BitRowsStandInTheWayOfOtherServersAlone) {
  for (const AttentionKind kind : {AttentionKind::kLocal, AttentionKind::kNone}) {
    Bundle bundle = plain_bundle();
    const BackendVerdict before = plan_of("oscar_int2", bundle).verdict();
    EXPECT_NE(before, BackendVerdict::kCannot);
    bundle.layers[1].geometry.attention = kind;
    EXPECT_EQ(kind_of(plan_of("oscar_int2", bundle)), ObstacleKind::kSlidingLayers) << "in 2 bits";
    bundle.layers[1].geometry.quantized = false;
    EXPECT_EQ(plan_of("oscar_int2", bundle).verdict(), before);
    EXPECT_EQ(kind_of(plan_of("sglang-v1", bundle)), ObstacleKind::kSlidingLayers);
  }
}

TEST(BackendPlan, WhatNothingOfTheBundleCanRunIsRefusedWithTheReason) {
  const auto expect_refused = [](ObstacleKind kind, const std::string& line,
                                 const std::function<void(Bundle&)>& change) {
    const BackendPlan plan = changed(change);
    EXPECT_EQ(plan.verdict(), BackendVerdict::kCannot);
    EXPECT_EQ(kind_of(plan), kind) << line;
    EXPECT_EQ(line_of(plan), line);
  };
  expect_refused(ObstacleKind::kHeadDim, "cannot: does not take head_dim 96",
                 [](Bundle& b) { b.model.head_dim_k = 96; });
  expect_refused(ObstacleKind::kSlidingLayers, "cannot: takes no layers with a sliding window",
                 [](Bundle& b) { b.layers[1].geometry.attention = AttentionKind::kSliding; });
  expect_refused(ObstacleKind::kSlidingLayers,
                 "cannot: takes no layers without keys and values of their own",
                 [](Bundle& b) { b.layers[1].geometry.attention = AttentionKind::kNone; });
  expect_refused(ObstacleKind::kQuantGroupSize, "cannot: takes no quantization groups of 16",
                 [](Bundle& b) { b.quantizer.quant_group_size = 16; });
  expect_refused(ObstacleKind::kWindowMultiple, "cannot: takes windows of multiples of 8 tokens",
                 [](Bundle& b) { b.quantizer.recent_tokens = 100; });
}

TEST(BackendPlan, WithoutAPortableVariantBothReasonsAreGiven) {
  const BackendPlan plan = changed([](Bundle& b) {
    center(b);
    b.portable.clear();
  });
  ASSERT_EQ(plan.obstacles.size(), 2u);
  EXPECT_EQ(plan.obstacles[1].kind, ObstacleKind::kNoPortable);
  EXPECT_EQ(line_of(plan), "cannot: values are centered (layer 1)");
  EXPECT_EQ(plans_json({plan})[0]["reason"],
            "values are centered (layer 1); the file has no portable variant");
}

TEST(BackendPlan, ThePortableErrorIsScaledToTheOnePair) {
  const BackendPlan plan = changed(center);
  EXPECT_EQ(plan.run->variant, BundleVariant::kPortableShared);
  EXPECT_EQ(plan.run->clips.pair, (ClipPair{0.93, 0.92}));
  EXPECT_DOUBLE_EQ(plan.run->relative_error.value(), 4 * (16.0 + 8.0) / (12.0 + 8.0));
  EXPECT_EQ(line_of(plan), "runs portable: predicted error 4.8 times");
}

// Each way of knowing it says how it is known, and many times the loss is not to be served.
TEST(BackendPlan, AMeasuredLossTakesThePlaceOfThePrediction) {
  Bundle bundle = plain_bundle();
  center(bundle);
  const Backend& backend = find_backend("sglang-v1");
  const auto line = [&](double own, double shared) {
    return line_of(plan_for(backend, bundle, {.own = own, .shared = shared, .per_head = {}}));
  };
  EXPECT_EQ(line(0.01, 0.27), "runs portable: KL about 27 times, do not serve");
  EXPECT_EQ(line(0.01, 0.03), "runs portable: KL about 3.0 times");
  EXPECT_EQ(line(0, 0.03), "runs portable: predicted error 4.8 times");
  for (double& error : bundle.portable[0].shared.predicted_output_nmse) error *= 9;
  EXPECT_NE(line(0, 0).find("times, measure first"), std::string::npos);
  EXPECT_NE(plans_text(plan_for_all(bundle)).find("0.5 to 2.3 times such a figure"),
            std::string::npos);
  // From the evaluation that the file stores.
  const auto kl = [](double mean) { return Json{{"kl", {{"mean", mean}}}}; };
  bundle.evaluation = Json{{"methods", {{"bundle", kl(0.01)}, {"portable", kl(0.27)}}}};
  const Json plan = plans_json({plan_for(backend, bundle)})[0];
  EXPECT_NEAR(plan["kl_factor"].get<double>(), 27, 1e-9);
  EXPECT_EQ(plan["do_not_serve"], true);
  bundle.evaluation = Json{{"methods", {{"bundle", kl(0.01)}, {"portable", 3}}}};
  EXPECT_TRUE(plans_json({plan_for(backend, bundle)})[0]["kl_factor"].is_null());
}

TEST(BackendPlan, AnEvaluationOfAnotherCacheIsNoMeasurement) {
  Bundle bundle = plain_bundle();
  const CacheFormat& own = bundle.quantizer;
  const Json report = {{"quantizer", {{"sink", own.sink_tokens}, {"recent", own.recent_tokens}}},
                       {"mode", "decode"},
                       {"first_position", own.sink_tokens + own.recent_tokens},
                       {"methods", {{"bundle", {{"kl", {{"mean", 0.01}}}}}}}};
  bundle.evaluation = report;
  EXPECT_TRUE(measured_kl(bundle).own);
  EXPECT_EQ(left_out_evaluation(bundle), "");
  const std::vector<std::pair<const char*, Json>> changes = {
      {"quantizer", {{"sink", own.sink_tokens + 1}}},
      {"first_position", 1},
      {"mode", "chunked:100000"}};
  for (const auto& [key, value] : changes) {
    bundle.evaluation = report;
    (*bundle.evaluation)[key] = value;
    EXPECT_FALSE(measured_kl(bundle).own) << key;
    EXPECT_NE(left_out_evaluation(bundle), "") << key;
  }
}

TEST(BackendPlan, WithoutASearchNoErrorIsClaimed) {
  const BackendPlan plan = changed([](Bundle& b) {
    center(b);
    b.layers[0].predicted_output_nmse.assign(kHeads, NAN);
  });
  EXPECT_FALSE(plan.run->relative_error.has_value());
  EXPECT_EQ(plan.run->unknown, ErrorUnknown::kNotMeasured);
  EXPECT_EQ(line_of(plan), "runs portable: error unknown: nothing was searched");
}

// As of a file that was written before losses were kept.
TEST(BackendPlan, WithoutLossesOfRatiosThePairIsThePublishedOneAndNoErrorIsClaimed) {
  const auto without_losses = [](Bundle& b) {
    center(b);
    for (PortableLayer& layer : b.portable) {
      for (LayerTransforms* variant : {&layer.shared, &layer.per_head}) {
        variant->key.clip_losses.reset();
        variant->value.clip_losses.reset();
      }
    }
  };
  const BackendPlan plan = changed(without_losses);
  EXPECT_EQ(plan.run->clips.pair, (ClipPair{kPublishedClipK, kPublishedClipV}));
  EXPECT_EQ(plan.run->unknown, ErrorUnknown::kNoClipLosses);
  EXPECT_TRUE(plans_json({plan})[0]["relative_error"].is_null());
  EXPECT_EQ(line_of(plan), "runs portable: error unknown: no clip losses");
  EXPECT_NE(plans_text({plan}).find("\nno clip losses: the file keeps none"), std::string::npos);
  // Ratios as stored need none.
  Bundle bundle = fp32_bundle();
  without_losses(bundle);
  EXPECT_DOUBLE_EQ(plan_of("onnxruntime", bundle).run->relative_error.value(), 4);
}

TEST(BackendPlan, OfTwoPortableVariantsTheOneOfLessErrorRuns) {
  Bundle bundle = plain_bundle();
  center(bundle);
  EXPECT_EQ(plan_of("sglang-v2", bundle).run->variant, BundleVariant::kPortableShared);  // a tie
  bundle.portable[0].per_head.predicted_output_nmse[0] = 0.01;
  EXPECT_EQ(plan_of("sglang-v2", bundle).run->variant, BundleVariant::kPortablePerHead);
  bundle.portable[0].shared.predicted_output_nmse[0] = NAN;
  EXPECT_EQ(line_of(plan_of("sglang-v1", bundle)),
            "runs portable: error unknown: nothing was searched");
  EXPECT_EQ(plan_of("sglang-v2", bundle).run->variant, BundleVariant::kPortablePerHead);
}

TEST(BackendPlan, LevelsOfItsOwnAreNeverPredicted) {
  Bundle bundle = plain_bundle();
  bundle.model.head_dim_k = bundle.model.head_dim_v = 128;
  const BackendPlan plan = plan_of("llama.cpp", bundle);
  EXPECT_EQ(plan.verdict(), BackendVerdict::kPortable);
  EXPECT_EQ(plan.run->unknown, ErrorUnknown::kOwnLevels);
  EXPECT_EQ(line_of(plan), "runs portable, coded in its own way: error unknown");
  bundle.model.architecture = "LlamaForCausalLM";
  EXPECT_EQ(kind_of(plan_of("llama.cpp", bundle)), ObstacleKind::kArchitecture);
  EXPECT_EQ(line_of(plan_of("llama.cpp", bundle)),
            "cannot: reads transforms for Qwen3ForCausalLM only");
}

TEST(BackendPlan, EveryBackendHasOneLineOfEightyColumns) {
  for (const int variety : {0, 1, 2, 3, 4, 5}) {
    Bundle bundle = plain_bundle();
    bundle.model.head_dim_k = bundle.model.head_dim_v = 128;
    bundle.quantizer.quant_group_size = 128;
    if (variety == 1) center(bundle);
    if (variety == 2 || variety == 3) bundle.portable.clear();
    if (variety == 3) {
      bundle.layers[1].geometry.layer_id = 1000;
      bundle.layers[1].key.kind[1] = TransformKind::kBalanced;
    }
    if (variety == 4) bundle.portable[0].per_head.key.clip_losses.reset();
    if (variety == 5) bundle.portable[0].per_head.predicted_output_nmse[0] = NAN;
    std::istringstream lines(plans_text(plan_for_all(bundle)));
    int continued = 0;
    for (std::string line; std::getline(lines, line);) {
      EXPECT_LE(line.size(), 80u) << line;
      continued += line.starts_with(" ");
    }
    EXPECT_EQ(continued, 0) << variety;
  }
}

}  // namespace

// The one pair of clipping ratios for many layers.

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
