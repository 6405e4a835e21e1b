// What each serving stack runs of a bundle, and the one pair of clipping ratios for it.
#include "oscar/stacks/stack_support.h"

#include <gtest/gtest.h>

#include <sstream>

#include "bundle/sample.h"
#include "oscar/stacks/clip_pool.h"

namespace oscar {
namespace {

constexpr int kHeadDim = 64, kHeads = 2;

Json find(const Json& support, const std::string& name) {
  for (const Json& stack : support) {
    if (stack["name"] == name) return stack;
  }
  return nullptr;
}

SideTransform plain_side(float clip) {
  SideTransform side;
  side.kind.assign(kHeads, TransformKind::kHadamard);
  side.fallback.assign(kHeads, "");
  side.forward = MatrixStack<float>(kHeads, kHeadDim, kHeadDim);
  for (int h = 0; h < kHeads; ++h) side.forward[h].setIdentity();
  side.mean = VectorStack<float>(kHeads, kHeadDim);
  side.recipe = SideRecipe(kHeads, {.clip_ratio = clip});
  return side;
}

// The record of a side's clip stage: losses of "before" (the published ratio) and of others.
Json clip_record(const std::vector<std::pair<std::string, double>>& losses) {
  Json names = Json::array(), nmse = Json::array();
  for (const auto& [name, loss] : losses) {
    names.push_back(name);
    nmse.push_back({loss, loss});
  }
  return {{"stages", {{{"stage", "clip"}, {"variants", names}, {"nmse", nmse}}}}};
}

LayerTransforms plain_layer(int id, float clip_k, float clip_v, double nmse) {
  LayerTransforms layer;
  layer.geometry = {.layer_id = id,
                    .num_qo_heads = 4,
                    .num_kv_heads = kHeads,
                    .head_dim_k = kHeadDim,
                    .head_dim_v = kHeadDim};
  layer.key = plain_side(clip_k);
  layer.value = plain_side(clip_v);
  layer.predicted_output_nmse.assign(kHeads, nmse);
  return layer;
}

// Two layers, everything plain; the portable layers prefer other keys' ratios each.
Bundle plain_bundle() {
  Bundle bundle;
  bundle.model = {.name = "m",
                  .architecture = "Qwen3ForCausalLM",
                  .num_layers = 2,
                  .num_qo_heads = 4,
                  .num_kv_heads = kHeads,
                  .head_dim_k = kHeadDim,
                  .head_dim_v = kHeadDim,
                  .hidden_size = 32,
                  .rope = {},
                  .config_sha256 = "",
                  .tokenizer_sha256 = "",
                  .chat_template_sha256 = "",
                  .weights_fingerprint = ""};
  bundle.quantizer.quant_group_size = kHeadDim;
  for (int id = 0; id < 2; ++id) {
    bundle.layers.push_back(plain_layer(id, 0.96F, 0.92F, 0.01));
    LayerTransforms portable = plain_layer(id, id == 0 ? 0.96F : 0.90F, 0.92F, 0.04);
    portable.search["key"] = id == 0 ? clip_record({{"before", 3}, {"0.93", 4}, {"0.90", 9}})
                                     : clip_record({{"before", 9}, {"0.93", 4}, {"0.90", 3}});
    portable.search["value"] = clip_record({{"before", 2}, {"off", 5}});
    bundle.portable.push_back({portable, portable});
  }
  return bundle;
}

TEST(ClipPool, LayersThatDisagreeGetThePairOfLeastSummedLoss) {
  const Bundle bundle = plain_bundle();
  const PooledClip pooled =
      pool_clips({&bundle.portable[0].shared, &bundle.portable[1].shared}, false);
  EXPECT_DOUBLE_EQ(pooled.pair.key, 0.93);  // 8 against 12 with either layer's own
  EXPECT_DOUBLE_EQ(pooled.pair.value, 0.92);
  EXPECT_DOUBLE_EQ(pooled.loss_factor, (16.0 + 8.0) / (12.0 + 8.0));  // two heads each
}

TEST(ClipPool, ABundlesOwnHeadsGetOnePairForTheModelOrForEachLayer) {
  Bundle bundle = plain_bundle();
  for (int id = 0; id < 2; ++id) {
    bundle.layers[id].search = bundle.portable[id].shared.search;
    bundle.layers[id].key.recipe.clip_ratio = {id == 0 ? 0.96F : 0.90F, 0.93F};
  }
  Bundle by_layer = bundle;
  const Json model = pool_own_clips(bundle, ClipScope::kModel);
  ASSERT_EQ(model.size(), 1u);
  // Keys have 4 in every head with .93; their own ratios gave 3 and 4. Values stay at 2.
  const double factor = (4 * 4.0 + 4 * 2.0) / (2 * 3.0 + 2 * 4.0 + 4 * 2.0);
  EXPECT_EQ(model[0]["clip"], Json({0.93, 0.92}));
  EXPECT_DOUBLE_EQ(model[0]["loss_factor"].get<double>(), factor);
  for (const LayerTransforms& layer : bundle.layers) {
    EXPECT_EQ(layer.key.recipe.clip_ratio, (std::vector<float>{0.93F, 0.93F}));
    EXPECT_DOUBLE_EQ(layer.predicted_output_nmse[1], 0.01 * factor);
  }
  const Json layers = pool_own_clips(by_layer, ClipScope::kLayer);
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_EQ(layers[0]["clip"], Json({0.96, 0.92}));
  EXPECT_EQ(layers[1]["clip"], Json({0.9, 0.92}));
  EXPECT_EQ(by_layer.layers[1].key.recipe.clip_ratio, (std::vector<float>{0.90F, 0.90F}));
  EXPECT_TRUE(pool_own_clips(by_layer, ClipScope::kHead).is_null());
}

TEST(ClipPool, LayersThatAgreeKeepTheirPairWithoutARecord) {
  Bundle bundle = plain_bundle();
  const PooledClip pooled = pool_clips({&bundle.layers[0], &bundle.layers[1]}, false);
  EXPECT_DOUBLE_EQ(pooled.pair.key, 0.96);
  EXPECT_EQ(pooled.loss_factor, 1);
}

TEST(ClipPool, RecordsThatMakeNoSenseGiveThePublishedPairAndNoLoss) {
  for (const Json& record :
       {Json(), Json("x"), Json{{"stages", 3}},
        Json{{"stages", {{{"stage", "clip"}, {"variants", {"y"}}, {"nmse", {{1}}}}}}},
        Json{{"stages", {{{"stage", "clip"}, {"variants", {"before"}}, {"nmse", 1}}}}}}) {
    Bundle bundle = plain_bundle();
    bundle.portable[1].shared.search["key"] = record;
    const PooledClip pooled =
        pool_clips({&bundle.portable[0].shared, &bundle.portable[1].shared}, false);
    EXPECT_EQ(pooled.pair.key, kPublishedClipK) << record;
    EXPECT_TRUE(std::isnan(pooled.loss_factor)) << record;
  }
}

TEST(ClipPool, OneRatioForBothSidesIsOneThatBothWereTriedWith) {
  Bundle bundle = plain_bundle();
  for (auto& layer : bundle.portable) {
    layer.shared.search["value"] = clip_record({{"before", 1}, {"0.93", 2}, {"0.90", 2}});
  }
  const PooledClip pooled =
      pool_clips({&bundle.portable[0].shared, &bundle.portable[1].shared}, true);
  EXPECT_DOUBLE_EQ(pooled.pair.key, 0.93);
  EXPECT_DOUBLE_EQ(pooled.pair.value, 0.93);
}

TEST(StackSupport, PlainRowsInFp32RunAsTheyAreOnSglang) {
  Bundle bundle = plain_bundle();
  bundle.quantizer.metadata_dtype = MetadataDtype::kFp32;
  const Json support = stack_support_json(bundle);
  EXPECT_EQ(find(support, "sglang-v1")["verdict"], "as is");
  EXPECT_EQ(find(support, "sglang-v2")["line"], "runs as is");
  EXPECT_EQ(find(support, "vllm")["verdict"], "portable");  // another zero
}

TEST(StackSupport, RowsInAnotherCodecRunAsTheyAreWhereThatIsTheCodec) {
  Bundle bundle = plain_bundle();
  bundle.quantizer.rules.zero = ZeroForm::kMinimum;
  const Json support = stack_support_json(bundle);
  EXPECT_EQ(find(support, "vllm")["verdict"], "as is");
  EXPECT_EQ(find(support, "onnxruntime")["verdict"], "portable");
  EXPECT_NE(find(support, "oscar")["reason"].get<std::string>().find("not the row's minimum"),
            std::string::npos);
}

// What one change of the bundle makes of sglang-v1's verdict.
Json changed(const std::function<void(Bundle&)>& change) {
  Bundle bundle = plain_bundle();
  bundle.quantizer.metadata_dtype = MetadataDtype::kFp32;
  change(bundle);
  return find(stack_support_json(bundle), "sglang-v1");
}

TEST(StackSupport, WhateverAStackLacksIsNamed) {
  const auto reason = [](const std::function<void(Bundle&)>& change) {
    const Json stack = changed(change);
    EXPECT_EQ(stack["verdict"], "portable");
    return stack["reason"].get<std::string>();
  };
  EXPECT_EQ(reason([](Bundle& b) { b.layers[1].value.mean[0](3) = 1; }),
            "values are centred (layer 1)");
  EXPECT_EQ(reason([](Bundle& b) { b.layers[0].key.forward[1](0, 0) = -1; }),
            "heads of keys differ (layer 0)");
  EXPECT_EQ(reason([](Bundle& b) { b.layers[0].key.recipe.rounding[1] = Rounding::kShaped; }),
            "rounding is shaped (layer 0)");
  EXPECT_EQ(reason([](Bundle& b) {
              b.layers[0].key.recipe.scale_correction[1] = ScaleCorrection::kMetric;
            }),
            "scales are corrected (layer 0)");
  EXPECT_EQ(reason([](Bundle& b) { b.layers[1].key.recipe.clip_ratio[0] = 0.5F; }),
            "it has fewer clipping ratios");
  EXPECT_NE(reason([](Bundle& b) {
              b.quantizer.metadata_dtype = MetadataDtype::kFp16;
            }).find("after coding"),
            std::string::npos);
}

TEST(StackSupport, WhatNothingOfTheBundleCanRunIsRefusedWithTheReason) {
  const auto line = [](const std::function<void(Bundle&)>& change) {
    const Json stack = changed(change);
    EXPECT_EQ(stack["verdict"], "cannot");
    return stack["line"].get<std::string>();
  };
  EXPECT_EQ(line([](Bundle& b) { b.model.head_dim_k = 96; }), "cannot: does not take head_dim 96");
  EXPECT_EQ(line([](Bundle& b) { b.layers[1].geometry.attention = AttentionKind::kSliding; }),
            "cannot: takes no layers with a sliding window");
  EXPECT_EQ(line([](Bundle& b) { b.quantizer.quant_group_size = 16; }),
            "cannot: takes no quantization groups of 16");
  EXPECT_EQ(line([](Bundle& b) { b.quantizer.recent_tokens = 100; }),
            "cannot: takes windows of multiples of 8 tokens");
  EXPECT_EQ(line([](Bundle& b) {
              b.layers[1].value.mean[0](3) = 1;
              b.portable.clear();
            }),
            "cannot: values are centred (layer 1)");
}

TEST(StackSupport, ThePortableErrorIsScaledToTheOnePair) {
  const Json stack = changed([](Bundle& b) { b.layers[1].value.mean[0](3) = 1; });
  EXPECT_EQ(stack["clip"], Json({0.93, 0.92}));
  EXPECT_DOUBLE_EQ(stack["relative_error"].get<double>(), 4 * (16.0 + 8.0) / (12.0 + 8.0));
  EXPECT_EQ(stack["line"], "runs portable, clip 0.93,0.92: predicted error 4.8 times");
}

TEST(StackSupport, WithoutASearchNoErrorIsClaimed) {
  const Json stack = changed([](Bundle& b) {
    b.layers[1].value.mean[0](3) = 1;
    b.layers[0].predicted_output_nmse.assign(kHeads, NAN);
  });
  EXPECT_TRUE(stack["relative_error"].is_null());
  EXPECT_EQ(stack["line"], "runs portable, clip 0.93,0.92: error unknown");
}

TEST(StackSupport, LevelsOfItsOwnAreNeverPredicted) {
  Bundle bundle = plain_bundle();
  bundle.model.head_dim_k = bundle.model.head_dim_v = 128;
  const Json stack = find(stack_support_json(bundle), "llama.cpp");
  EXPECT_EQ(stack["verdict"], "portable");
  EXPECT_TRUE(stack["relative_error"].is_null());
  bundle.model.architecture = "LlamaForCausalLM";
  EXPECT_EQ(find(stack_support_json(bundle), "llama.cpp")["line"],
            "cannot: reads transforms for Qwen3ForCausalLM only");
}

TEST(StackSupport, EveryStackHasOneLineOfEightyColumns) {
  for (const int variety : {0, 1, 2, 3}) {
    Bundle bundle = plain_bundle();
    bundle.model.head_dim_k = bundle.model.head_dim_v = 128;
    bundle.quantizer.quant_group_size = 128;
    if (variety == 1) bundle.layers[1].value.mean[0](3) = 1;
    if (variety >= 2) bundle.portable.clear();
    if (variety == 3) {
      bundle.layers[1].geometry.layer_id = 1000;
      bundle.layers[1].key.kind[1] = TransformKind::kBalanced;
    }
    const std::string text = stack_support_text(stack_support_json(bundle));
    std::istringstream lines(text);
    int continued = 0;
    for (std::string line; std::getline(lines, line);) {
      EXPECT_LE(line.size(), 80u) << line;
      continued += line.starts_with(" ");
    }
    EXPECT_EQ(continued, 0) << text;
  }
}

}  // namespace
}  // namespace oscar
