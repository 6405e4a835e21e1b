// config.json of models with experts: which layers have them, how they are chosen, what is refused.
#include <gtest/gtest.h>

#include "checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/checkpoint/checkpoint.h"
#include "oscar/checkpoint/weight_table.h"

namespace {

using namespace oscar;
using namespace oscar_test;

Json sizes() {
  return {{"hidden_size", 32},        {"intermediate_size", 48},        {"num_hidden_layers", 4},
          {"num_attention_heads", 4}, {"num_key_value_heads", 2},       {"head_dim", 16},
          {"vocab_size", 64},         {"max_position_embeddings", 1024}};
}

Json merged(Json config, const Json& more) {
  config.update(more);
  return config;
}

Json qwen(const Json& more = Json::object()) {
  return merged(merged(sizes(), {{"model_type", "qwen3_moe"},
                                 {"architectures", {"Qwen3MoeForCausalLM"}},
                                 {"num_experts", 8},
                                 {"num_experts_per_tok", 2},
                                 {"moe_intermediate_size", 24}}),
                more);
}

Json glm(const Json& more = Json::object()) {
  return merged(merged(sizes(), {{"model_type", "glm4_moe"},
                                 {"architectures", {"Glm4MoeForCausalLM"}},
                                 {"n_routed_experts", 8},
                                 {"num_experts_per_tok", 2},
                                 {"moe_intermediate_size", 24},
                                 {"n_shared_experts", 2},
                                 {"partial_rotary_factor", 0.5},
                                 {"routed_scaling_factor", 2.5}}),
                more);
}

ModelConfig parse(const Json& config) { return parse_model_config(config, "config.json"); }

std::string refusal_of(const Json& config) {
  try {
    parse(config);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

// One letter a layer: e of experts, d of a dense MLP.
std::string kinds(const Json& config) {
  std::string text;
  for (const LayerSpec& layer : parse(config).layers) text += layer.experts() ? 'e' : 'd';
  return text;
}

TEST(ExpertsConfig, ChoosesTheLayersWithExpertsAsQwenDoes) {
  EXPECT_EQ(kinds(qwen()), "eeee");
  EXPECT_EQ(kinds(qwen({{"decoder_sparse_step", 2}})), "dede");
  EXPECT_EQ(kinds(qwen({{"mlp_only_layers", {0, 3, 77}}})), "deed");
  EXPECT_EQ(kinds(qwen({{"decoder_sparse_step", 2}, {"mlp_only_layers", {1}}})), "ddde");
  EXPECT_EQ(kinds(qwen({{"num_experts", 0}})), "dddd");
}

TEST(ExpertsConfig, GlmBeginsWithDenseLayers) {
  EXPECT_EQ(kinds(glm()), "deee");
  EXPECT_EQ(kinds(glm({{"first_k_dense_replace", 3}})), "ddde");
  EXPECT_EQ(kinds(glm({{"first_k_dense_replace", 0}})), "eeee");
}

TEST(ExpertsConfig, PutsLayersThatComputeTheSameTogether) {
  using Groups = std::vector<std::vector<int>>;
  EXPECT_EQ(parse(glm()).layers_by_spec(), (Groups{{0}, {1, 2, 3}}));
  EXPECT_EQ(parse(qwen({{"decoder_sparse_step", 2}})).layers_by_spec(), (Groups{{0, 2}, {1, 3}}));
  EXPECT_EQ(parse(qwen()).layers_by_spec(), (Groups{{0, 1, 2, 3}}));
}

TEST(ExpertsConfig, ReadsHowQwenWeighsItsExperts) {
  const LayerSpec layer = parse(qwen({{"norm_topk_prob", true}})).layer(0);
  const ExpertsSpec& experts = *layer.experts();
  EXPECT_EQ(experts.num_experts, 8);
  EXPECT_EQ(experts.top_k, 2);
  EXPECT_EQ(experts.intermediate_size, 24);
  EXPECT_EQ(experts.score, RouterScore::kSoftmax);
  EXPECT_TRUE(experts.normalize);
  EXPECT_FALSE(experts.choice_bias);
  EXPECT_EQ(experts.scaling, 1.0);
  EXPECT_EQ(layer.dense_intermediate_size(), 0);
  EXPECT_FALSE(parse(qwen()).layer(0).experts()->normalize);
  EXPECT_TRUE(layer.attention.qk_norm);
}

TEST(ExpertsConfig, ReadsHowGlmWeighsItsExperts) {
  const ModelConfig config =
      parse(glm({{"n_group", 4}, {"topk_group", 2}, {"attention_bias", true}}));
  const ExpertsSpec& experts = *config.layer(1).experts();
  EXPECT_EQ(experts.score, RouterScore::kSigmoid);
  EXPECT_TRUE(experts.choice_bias);
  EXPECT_TRUE(experts.normalize);  // by default
  EXPECT_EQ(experts.num_sets, 4);
  EXPECT_EQ(experts.top_sets, 2);
  EXPECT_EQ(experts.scaling, 2.5);
  EXPECT_EQ(experts.shared_intermediate_size, 48);
  EXPECT_TRUE(config.layer(0).attention.qkv_bias);
  EXPECT_FALSE(config.layer(0).attention.o_bias);
  EXPECT_FALSE(config.layer(0).attention.qk_norm);
  EXPECT_TRUE(parse(glm({{"use_qk_norm", true}})).layer(0).attention.qk_norm);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
}

TEST(ExpertsConfig, GlmTurnsAPartOfEachHead) {
  const Rope rope = parse(glm()).rope;
  EXPECT_EQ(rope.rotary_dim, 8);
  ASSERT_EQ(rope.inv_freq.size(), 4u);
  EXPECT_DOUBLE_EQ(rope.inv_freq[1], std::pow(10000.0, -2.0 / 8));
  EXPECT_EQ(rope.as_run["partial_rotary_factor"], 0.5);
  Json absent = glm();
  absent.erase("partial_rotary_factor");
  EXPECT_EQ(parse(absent).rope.rotary_dim, 8);  // the family's default
  const Json inside = {{"rope_theta", 1e6}, {"partial_rotary_factor", 0.25}};
  absent["rope_parameters"] = inside;
  EXPECT_EQ(parse(absent).rope.rotary_dim, 4);
  const Json yarn = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 256}};
  const Rope scaled = parse_model_config(absent, "config.json", yarn).rope;
  EXPECT_EQ(scaled.rotary_dim, 4);
  EXPECT_EQ(scaled.theta, 1e6);
  // A bundle's record makes the same frequencies again.
  Json record = scaled.as_run;
  record.erase("max_positions");
  EXPECT_EQ(make_rope(record, 16, 1024, "bundle").inv_freq, scaled.inv_freq);
}

TEST(ExpertsConfig, TakesTheKeysAsTransformers5WritesThem) {
  Json renamed = qwen({{"num_local_experts", 8}});
  renamed.erase("num_experts");
  EXPECT_EQ(parse(renamed).layer(0).experts()->num_experts, 8);
  EXPECT_EQ(refusal_of(qwen({{"num_local_experts", 8}})), "accepted");
  EXPECT_NE(refusal_of(qwen({{"num_local_experts", 4}})).find("two keys disagree"),
            std::string::npos);
  EXPECT_EQ(parse(glm({{"num_mtp_layers", 2}})).further_layers, 2);
  EXPECT_EQ(parse(glm()).further_layers, 1);
}

TEST(ExpertsConfig, RefusesChoicesThatCannotBeMade) {
  const std::pair<Json, const char*> cases[] = {
      {qwen({{"num_experts_per_tok", 9}}), "num_experts_per_tok"},
      {qwen({{"num_experts", 1 << 20}}), "num_experts"},
      {qwen({{"num_experts", -1}}), "num_experts"},
      {qwen({{"decoder_sparse_step", 0}}), "decoder_sparse_step"},
      {qwen({{"mlp_only_layers", 3}}), "mlp_only_layers"},
      {qwen({{"mlp_only_layers", {-1}}}), "mlp_only_layers"},
      {qwen({{"norm_topk_prob", 1}}), "norm_topk_prob"},
      {qwen({{"n_shared_experts", 1}}), "n_shared_experts"},
      {qwen({{"partial_rotary_factor", 0.5}}), "partial_rotary_factor"},
      {glm({{"n_routed_experts", 0}}), "n_routed_experts"},
      {glm({{"n_group", 3}}), "n_group"},
      {glm({{"n_group", 8}}), "n_group"},  // one expert in each
      {glm({{"n_group", 4}, {"topk_group", 5}}), "topk_group"},
      {glm({{"n_group", 4}, {"topk_group", 1}, {"num_experts_per_tok", 3}}), "num_experts_per_tok"},
      {glm({{"routed_scaling_factor", -1.0}}), "routed_scaling_factor"},
      {glm({{"routed_scaling_factor", "2"}}), "routed_scaling_factor"},
      {glm({{"n_shared_experts", 2000}, {"moe_intermediate_size", 1 << 22}}), "n_shared_experts"},
      {glm({{"partial_rotary_factor", 0.0}}), "partial_rotary_factor"},
      {glm({{"partial_rotary_factor", 1.5}}), "partial_rotary_factor"},
      {glm({{"partial_rotary_factor", 0.2}}), "partial_rotary_factor"},  // 3 dimensions
      {glm({{"kv_lora_rank", 512}}), "kv_lora_rank"},
      {glm({{"decoder_sparse_step", 1}}), "decoder_sparse_step"}};
  for (const auto& [config, key] : cases) {
    EXPECT_NE(refusal_of(config).find(key), std::string::npos) << key << ": " << refusal_of(config);
  }
}

TEST(ExpertsConfig, RefusesLatentAttentionByName) {
  Json config = glm({{"architectures", {"DeepseekV3ForCausalLM"}}, {"kv_lora_rank", 512}});
  const std::string message = refusal_of(config);
  EXPECT_NE(message.find("DeepseekV3ForCausalLM"), std::string::npos);
  EXPECT_NE(message.find("MLA"), std::string::npos) << message;
}

TEST(ExpertsConfig, NamesTheTensorsOfEveryExpert) {
  const ModelConfig config = parse(glm());
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const WeightSpec& spec : layer_weights(config, 1)) shapes[spec.name] = spec.shape;
  EXPECT_EQ(shapes.size(), 2 + 4 + 2 + 3 + 8 * 3u);  // norms, attention, router, shared, experts
  const std::string mlp = "model.layers.1.mlp.";
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(shapes.at(mlp + "gate.weight"), (Shape{8, 32}));
  EXPECT_EQ(shapes.at(mlp + "gate.e_score_correction_bias"), (Shape{8}));
  EXPECT_EQ(shapes.at(mlp + "experts.7.up_proj.weight"), (Shape{24, 32}));
  EXPECT_EQ(shapes.at(mlp + "experts.0.down_proj.weight"), (Shape{32, 24}));
  EXPECT_EQ(shapes.at(mlp + "shared_experts.down_proj.weight"), (Shape{32, 48}));
  EXPECT_EQ(layer_weights(config, 0).size(), 2 + 4 + 3u);
}

}  // namespace
