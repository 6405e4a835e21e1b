#include "oscar/model/checkpoint/config.h"

#include <gtest/gtest.h>
#include <cmath>
#include <functional>

#include "model/checkpoint/fp8_folder.h"
#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/model/checkpoint/checkpoint.h"
#include "oscar/model/checkpoint/weights.h"

// config.json of models with experts: which layers have them, how they are chosen, what is refused.

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

TEST(ExpertsConfig, AcceptsTheKeysOfQwen3CoderThatChangeNothing) {
  const Json coder = {{"qkv_bias", false},
                      {"use_qk_norm", true},
                      {"shared_expert_intermediate_size", 0},
                      {"max_window_layers", 28}};
  EXPECT_EQ(parse(qwen(coder)).layers, parse(qwen()).layers);
  for (const auto& [key, value] : {std::pair<const char*, Json>{"qkv_bias", true},
                                   {"use_qk_norm", false},
                                   {"shared_expert_intermediate_size", 512}}) {
    EXPECT_NE(refusal_of(qwen({{key, value}})).find(key), std::string::npos) << key;
  }
}

TEST(ExpertsConfig, NamesAllKeysThatItDoesNotKnowAtOnce) {
  const std::string said = refusal_of(
      qwen({{"new_switch", 3}, {"another", "on"}, {"alibi", true}, {"clip_qkv", nullptr}}));
  for (const char* word : {"3 keys", "new_switch: 3 (not known)", "another: \"on\" (not known)",
                           "alibi: true (position biases instead of RoPE)", "remove it"}) {
    EXPECT_NE(said.find(word), std::string::npos) << word << " is not in " << said;
  }
  EXPECT_EQ(said.find("clip_qkv"), std::string::npos);
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

// config.json: what is read, what is refused by name, and what the sizes must be.

namespace {

using namespace oscar;

Json base(const std::string& type = "qwen3", const std::string& architecture = "Qwen3ForCausalLM") {
  return {{"model_type", type},       {"architectures", {architecture}},
          {"hidden_size", 128},       {"intermediate_size", 256},
          {"num_hidden_layers", 4},   {"num_attention_heads", 8},
          {"num_key_value_heads", 2}, {"head_dim", 32},
          {"vocab_size", 512},        {"max_position_embeddings", 1024}};
}

Json mistral() { return base("mistral", "MistralForCausalLM"); }
Json llama() { return base("llama", "LlamaForCausalLM"); }
Json qwen2() { return base("qwen2", "Qwen2ForCausalLM"); }

Json gemma3() {
  Json config = base("gemma3_text", "Gemma3ForCausalLM");
  config["num_hidden_layers"] = 6;
  config["sliding_window"] = 64;
  config["sliding_window_pattern"] = 3;
  return config;
}

Json with(Json config, const std::string& key, Json value) {
  config[key] = std::move(value);
  return config;
}

std::string refusal(const Json& config) {
  try {
    parse_model_config(config, "config.json");
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

// Of every layer; 0: it sees all keys.
std::vector<int> windows(const Json& config) {
  std::vector<int> found;
  for (const LayerSpec& layer : parse_model_config(config, "").layers) {
    found.push_back(layer.attention.window);
  }
  return found;
}

TEST(ModelConfig, KnowsWeightsInFp8) {
  EXPECT_FALSE(parse_model_config(base(), "").fp8);
  const Json quantization = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  for (const Json& config : {base(), llama(), mistral()}) {
    const auto fp8 = parse_model_config(with(config, "quantization_config", quantization), "").fp8;
    ASSERT_TRUE(fp8);
    EXPECT_EQ(fp8->layout, ScaleLayout::kBlock);
  }
}

TEST(ModelConfig, RefusesKeysThatChangeTheComputationByName) {
  const Json cases[] = {
      with(base(), "attn_logit_softcapping", 50.0),
      with(base(), "final_logit_softcapping", 30.0),
      with(base(), "query_pre_attn_scalar", 256),
      with(base(), "attention_multiplier", 0.1),
      with(base(), "residual_multiplier", 0.22),
      with(base(), "logits_scaling", 8.0),
      with(base(), "attention_sinks", true),
      with(base(), "num_experts", 128),
      with(llama(), "n_routed_experts", 128),
      with(base(), "quantization_config", {{"quant_method", "gptq"}}),
      with(base(), "mlp_bias", true),
      with(mistral(), "attention_bias", true),
      with(mistral(), "use_sliding_window", true),
      with(llama(), "sliding_window", 4096),
      with(base(), "hidden_act", "gelu"),
      with(gemma3(), "hidden_activation", "gelu"),
      with(gemma3(), "attn_logit_softcapping", 50.0),
      with(gemma3(), "final_logit_softcapping", 30.0),
      with(gemma3(), "use_bidirectional_attention", true),
      with(base(), "some_future_switch", true),
  };
  for (const Json& config : cases) {
    const std::string key = std::prev(config.end()).key();
    EXPECT_NE(refusal(config).find("config.json: " + key), std::string::npos)
        << key << ": " << refusal(config);
  }
}

TEST(ModelConfig, AcceptsTheSameKeysWhereTheyChangeNothing) {
  for (const Json& config :
       {with(base(), "attn_logit_softcapping", nullptr), with(base(), "residual_multiplier", 1.0),
        with(base(), "logits_scaling", 1), with(base(), "num_experts", 0),
        with(mistral(), "attention_bias", false), with(llama(), "sliding_window", nullptr),
        with(base(), "torch_dtype", "bfloat16"), with(base(), "pruned_heads", Json::object()),
        with(base(), "some_future_switch", nullptr)}) {
    EXPECT_EQ(refusal(config), "accepted") << config.dump();
  }
}

TEST(ModelConfig, LocalLayersOfGemma3KeepTheirWindowsAndHaveARopeOfTheirOwn) {
  const ModelConfig config = parse_model_config(gemma3(), "");
  EXPECT_EQ(windows(gemma3()), (std::vector{64, 64, 0, 64, 64, 0}));
  EXPECT_EQ(config.num_fitted_layers(), 2);
  EXPECT_EQ(config.rope_of(0).theta, 1e4);
  EXPECT_EQ(config.rope_of(2).theta, 1e6);
  // Whatever the recent tokens are.
  for (const int recent : {0, 63, 256}) {
    EXPECT_FALSE(config.geometry(0, recent).quantized);
    EXPECT_FALSE(config.geometry(0, recent).fitted());
    EXPECT_TRUE(config.geometry(2, recent).quantized);
  }
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.norm_offset, 1);
  EXPECT_EQ(config.embedding_scale, std::sqrt(128.0));
  EXPECT_EQ(config.sm_scale, 1 / std::sqrt(256.0));
}

TEST(ModelConfig, ScalingOfTheRopeReachesGlobalLayersAlone) {
  const Json linear = {{"rope_type", "linear"}, {"factor", 4.0}};
  const ModelConfig plain = parse_model_config(gemma3(), "");
  const ModelConfig scaled = parse_model_config(gemma3(), "", linear);
  EXPECT_EQ(scaled.local_rope->inv_freq, plain.local_rope->inv_freq);
  EXPECT_EQ(scaled.rope.max_positions, 1024);  // the length is that of the scaled model
  for (size_t i = 0; i < plain.rope.inv_freq.size(); ++i) {
    EXPECT_DOUBLE_EQ(scaled.rope.inv_freq[i], plain.rope.inv_freq[i] / 4);
  }
}

TEST(ModelConfig, RefusesGemma3WithoutGlobalLayersOrWithoutAWindow) {
  EXPECT_NE(refusal(with(gemma3(), "sliding_window_pattern", 7)).find("nothing to quantize"),
            std::string::npos);
  EXPECT_NE(refusal(with(gemma3(), "sliding_window_pattern", 0)).find("sliding_window_pattern"),
            std::string::npos);
  EXPECT_NE(refusal(with(gemma3(), "sliding_window", nullptr)).find("no window"),
            std::string::npos);
  const Json flat = {{"rope_theta", 1e6}};
  EXPECT_NE(refusal(with(gemma3(), "rope_parameters", flat)).find("sorted by type of layer"),
            std::string::npos);
}

TEST(ModelConfig, NamesWhatATextHalfLacks) {
  Json config = {{"model_type", "gemma3"}, {"architectures", {"Gemma3ForConditionalGeneration"}}};
  EXPECT_NE(refusal(config).find("text_config"), std::string::npos);
  config["text_config"] = Json::array();
  EXPECT_NE(refusal(config).find("text_config"), std::string::npos);
  config["text_config"] = {{"model_type", "gemma4_text"}};
  EXPECT_NE(refusal(config).find("gemma3_text"), std::string::npos) << refusal(config);
  config["model_type"] = "gemma4";
  EXPECT_NE(refusal(config).find("disagree"), std::string::npos);
}

TEST(ModelConfig, ATextHalfTakesQuantizationAndTokensFromAboveIt) {
  Json text = gemma3();
  text.erase("architectures");
  text["eos_token_id"] = 5;
  const Json whole = {{"model_type", "gemma3"},
                      {"architectures", {"Gemma3ForConditionalGeneration"}},
                      {"text_config", text},
                      {"vision_config", Json::object()},
                      {"mm_tokens_per_image", 256},
                      {"eos_token_id", {1, 106}},
                      {"quantization_config", {{"quant_method", "fp8"}}}};
  const ModelConfig config = parse_model_config(whole, "config.json");
  EXPECT_EQ(config.architecture, "Gemma3ForConditionalGeneration");
  EXPECT_EQ(config.layers, parse_model_config(gemma3(), "").layers);
  EXPECT_EQ(config.eos_token_ids, (std::vector<int32_t>{1, 106}));
  EXPECT_TRUE(config.fp8);
  EXPECT_FALSE(config.tie_is_stated);
  EXPECT_TRUE(config.tie_word_embeddings);
  const Json absent = with(whole, "architectures", nullptr);
  EXPECT_EQ(parse_model_config(absent, "").architecture, "Gemma3ForConditionalGeneration");
}

TEST(ModelConfig, RefusesWhatTheNewerFamiliesDoNotDo) {
  const Json phi = base("phi3", "Phi3ForCausalLM"), hy = base("hy_v3", "HYV3ForCausalLM"),
             minimax = base("minimax_m2", "MiniMaxM2ForCausalLM"),
             ministral = base("ministral3", "Ministral3ForCausalLM");
  const Json longrope = {
      {"rope_type", "longrope"}, {"short_factor", {1.0}}, {"long_factor", {2.0}}};
  const std::pair<Json, const char*> cases[] = {
      {with(phi, "rope_scaling", longrope), "longrope"},
      {with(phi, "rope_scaling", {{"type", "yarn"}, {"factor", 4.0}}), "longrope"},
      {ministral, "rope_parameters"},
      {with(ministral, "rope_parameters", {{"rope_theta", 1e6}, {"llama_4_scaling_beta", 0.1}}),
       "original_max_position_embeddings"},
      {with(hy, "route_norm", false), "route_norm"},
      {with(hy, "moe_router_use_sigmoid", false), "moe_router_use_sigmoid"},
      {with(hy, "mlp_bias", true), "mlp_bias"},
      {with(hy, "expert_hidden_dim", 7), "expert_hidden_dim"},
      {with(hy, "mlp_layer_types", {"dense"}), "mlp_layer_types"},
      {with(hy, "mlp_layer_types", {"dense", "dense", "sparse", "linear"}), "mlp_layer_types"},
      {with(with(hy, "mlp_layer_types", {"dense", "dense", "sparse", "sparse"}),
            "first_k_dense_replace", 1),
       "first_k_dense_replace"},
      {with(minimax, "scoring_func", "softmax"), "scoring_func"},
      {with(minimax, "qk_norm_type", "per_head"), "qk_norm_type"},
      {with(minimax, "shared_intermediate_size", 64), "shared_intermediate_size"},
      {with(minimax, "attn_type_list", {1, 1, 0, 1}), "attn_type_list"},
      {with(minimax, "layernorm_mlp_beta", 0.5), "layernorm_mlp_beta"},
      {with(minimax, "rotary_dim", 33), "rotary_dim"},
      {with(with(minimax, "rotary_dim", 16), "partial_rotary_factor", 1.0), "rotary_dim"}};
  for (const auto& [config, key] : cases) {
    EXPECT_NE(refusal(config).find(key), std::string::npos) << key << ": " << refusal(config);
  }
}

TEST(ModelConfig, MiniMaxTurnsWhatRotaryDimSays) {
  const Json minimax = base("minimax_m2", "MiniMaxM2ForCausalLM");
  EXPECT_EQ(parse_model_config(minimax, "").rope.rotary_dim, 32);
  EXPECT_EQ(parse_model_config(with(minimax, "rotary_dim", 16), "").rope.rotary_dim, 16);
  const Json yarn = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 256}};
  EXPECT_EQ(parse_model_config(with(minimax, "rotary_dim", 16), "", yarn).rope.rotary_dim, 16);
}

TEST(ModelConfig, QueriesOfMinistralGrowAsTheFileSaysWhateverScalingIsAskedFor) {
  const Json scaled = {{"rope_type", "yarn"},
                       {"rope_theta", 1e6},
                       {"factor", 4.0},
                       {"original_max_position_embeddings", 256},
                       {"llama_4_scaling_beta", 0.1}};
  const Json file = with(base("ministral3", "Ministral3ForCausalLM"), "rope_parameters", scaled);
  const Json linear = {{"rope_type", "linear"}, {"factor", 2.0}};
  for (const auto& config : {parse_model_config(file, ""), parse_model_config(file, "", linear)}) {
    ASSERT_TRUE(config.query_scaling);
    EXPECT_EQ(config.query_scaling->beta, 0.1);
    EXPECT_EQ(config.query_scaling->length, 256);
  }
}

TEST(ModelConfig, RefusesRopeTypesAndParametersThatAreNotImplemented) {
  for (const char* type : {"dynamic", "longrope", "mrope", "su", "ntk", ""}) {
    const Json scaling = {{"rope_type", type}, {"factor", 2.0}};
    EXPECT_NE(refusal(with(base(), "rope_scaling", scaling)).find("RoPE type"), std::string::npos);
    const Json old = {{"type", type}, {"factor", 2.0}};
    EXPECT_NE(refusal(with(base(), "rope_scaling", old)).find("RoPE type"), std::string::npos);
  }
  for (const Json& parameters :
       {Json{{"mrope_section", {16, 24, 24}}}, Json{{"short_factor", {1.0}}},
        Json{{"full_attention", {{"rope_type", "default"}}}}, Json{{"partial_rotary_factor", 0.5}},
        Json{{"rope_theta", 0.0}}, Json{{"rope_theta", "10000"}}, Json{{"rope_type", 7}},
        Json{{"rope_type", "yarn"}}, Json{{"rope_type", "linear"}},
        Json{{"rope_type", "linear"}, {"factor", -1.0}},
        Json{{"rope_type", "llama3"}, {"factor", 8.0}}}) {
    EXPECT_NE(refusal(with(base(), "rope_parameters", parameters)).find("rope "), std::string::npos)
        << parameters.dump();
  }
  EXPECT_NE(refusal(with(base(), "rope_scaling", "yarn")).find("not a JSON object"),
            std::string::npos);
  EXPECT_NE(refusal(with(base(), "partial_rotary_factor", 0.25)).find("partial"),
            std::string::npos);
}

TEST(ModelConfig, RefusesAbsurdSizes) {
  const std::pair<const char*, Json> cases[] = {
      {"hidden_size", int64_t{1} << 40},
      {"hidden_size", -128},
      {"hidden_size", 0},
      {"hidden_size", 128.5},
      {"hidden_size", "128"},
      {"num_hidden_layers", 1000000},
      {"num_attention_heads", -8},
      {"num_key_value_heads", 3},
      {"num_key_value_heads", 16},
      {"head_dim", 33},
      {"head_dim", 0},
      {"vocab_size", UINT64_MAX},
      {"max_position_embeddings", INT64_MIN},
      {"rms_norm_eps", -1e-6},
      {"rms_norm_eps", "small"},
      {"tie_word_embeddings", 1},
      {"eos_token_id", -2},
      {"eos_token_id", Json::array({1, "x"})},
      {"intermediate_size", Json::array()},
  };
  for (const auto& [key, value] : cases) {
    EXPECT_NE(refusal(with(base(), key, value)).find(std::string("config.json: ") + key),
              std::string::npos)
        << key << " = " << value.dump() << ": " << refusal(with(base(), key, value));
  }
  Json uneven = qwen2();
  uneven.erase("head_dim");
  uneven["hidden_size"] = 130;
  EXPECT_NE(refusal(uneven).find("hidden_size"), std::string::npos);
}

TEST(ModelConfig, RefusesUnknownArchitecturesAndListsTheSupportedOnes) {
  const std::string message = refusal(base("gpt2", "GPT2LMHeadModel"));
  EXPECT_NE(message.find("GPT2LMHeadModel"), std::string::npos);
  EXPECT_NE(message.find("Qwen3ForCausalLM"), std::string::npos);
  EXPECT_NE(refusal(base("llama", "Qwen3ForCausalLM")).find("disagree"), std::string::npos);
  EXPECT_NE(refusal(Json::array()).find("not a JSON object"), std::string::npos);
  EXPECT_NE(refusal(Json::object()).find("not supported"), std::string::npos);
  EXPECT_NE(refusal(with(base(), "architectures", Json::array())), "accepted");
}

TEST(ModelConfig, FindsTheFamilyByModelTypeWhenArchitecturesIsAbsent) {
  Json config = base();
  config.erase("architectures");
  EXPECT_EQ(parse_model_config(config, "").architecture, "Qwen3ForCausalLM");
}

TEST(ModelConfig, GivesMistralItsDefaultWindowUnlessItIsNull) {
  EXPECT_EQ(windows(mistral()), (std::vector{4096, 4096, 4096, 4096}));
  EXPECT_EQ(windows(with(mistral(), "sliding_window", nullptr)), (std::vector{0, 0, 0, 0}));
}

TEST(ModelConfig, ChoosesWindowLayersAsQwenDoes) {
  Json config = with(qwen2(), "use_sliding_window", true);
  config["max_window_layers"] = 3;
  config["sliding_window"] = 64;
  EXPECT_EQ(windows(config), (std::vector{0, 0, 0, 64}));
  config["layer_types"] = {"sliding_attention", "full_attention", "full_attention",
                           "full_attention"};
  EXPECT_EQ(windows(config), (std::vector{64, 0, 0, 0}));
  config["use_sliding_window"] = false;
  EXPECT_NE(refusal(config).find("sliding layers have no window"), std::string::npos);
  config["layer_types"][1] = "linear_attention";
  EXPECT_NE(refusal(config).find("linear_attention"), std::string::npos);
  config["layer_types"] = {"full_attention"};
  EXPECT_NE(refusal(config).find("one type per layer"), std::string::npos);
}

TEST(ModelConfig, MarksWindowsThatFitTheRecentTokensAsNeverQuantized) {
  const ModelConfig config = parse_model_config(with(mistral(), "sliding_window", 256), "");
  EXPECT_FALSE(config.geometry(0, 256).quantized);
  EXPECT_TRUE(config.geometry(0, 255).quantized);
  EXPECT_EQ(config.geometry(3, 256).layer_id, 3);
  EXPECT_EQ(config.geometry(3, 256).sliding_window, 256);
  EXPECT_TRUE(parse_model_config(base(), "").geometry(0, 1 << 20).quantized);
}

TEST(ModelConfig, ReadsRopeInBothStylesToTheSameFrequencies) {
  const Json yarn = {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 512}};
  Json old_style = with(with(base(), "rope_theta", 1e6), "rope_scaling", yarn);
  Json parameters = yarn;
  parameters["rope_theta"] = 1e6;
  const Json new_style = with(base(), "rope_parameters", parameters);
  const ModelConfig a = parse_model_config(old_style, ""), b = parse_model_config(new_style, "");
  EXPECT_EQ(a.rope.inv_freq, b.rope.inv_freq);
  EXPECT_EQ(a.rope.as_run, b.rope.as_run);
  EXPECT_EQ(a.rope.max_positions, 2048);
  const ModelConfig overridden =
      parse_model_config(with(base(), "rope_theta", 1e6), "", std::optional<Json>(yarn));
  EXPECT_EQ(overridden.rope.as_run, a.rope.as_run);
}

TEST(Rope, DefaultFrequenciesArePowersOfTheta) {
  const Rope rope = make_rope({{"rope_theta", 10000.0}}, 8, 2048, "");
  ASSERT_EQ(rope.inv_freq.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(rope.inv_freq[i], std::pow(10.0, -i));
  EXPECT_EQ(rope.attention_factor, 1.0);
  EXPECT_EQ(rope.max_positions, 2048);
}

TEST(Rope, Llama3KeepsFastPairsAndStretchesSlowOnes) {
  const Json parameters = {{"rope_type", "llama3"},   {"rope_theta", 500000.0},
                           {"factor", 8.0},           {"low_freq_factor", 1.0},
                           {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 8192}};
  const Rope plain = make_rope({{"rope_theta", 500000.0}}, 128, 131072, "");
  const Rope rope = make_rope(parameters, 128, 131072, "");
  EXPECT_EQ(rope.inv_freq.front(), plain.inv_freq.front());
  EXPECT_DOUBLE_EQ(rope.inv_freq.back(), plain.inv_freq.back() / 8.0);
  for (size_t i = 1; i < rope.inv_freq.size(); ++i) {
    EXPECT_LT(rope.inv_freq[i], rope.inv_freq[i - 1]);
  }
  EXPECT_EQ(rope.max_positions, 131072);  // the config's own length, not 8 x 8192
}

TEST(Rope, YarnSetsItsMagnitudeAndStretchesTheSlowestPair) {
  const Json parameters = {{"rope_type", "yarn"},
                           {"rope_theta", 1e6},
                           {"factor", 4.0},
                           {"original_max_position_embeddings", 32768}};
  const Rope plain = make_rope({{"rope_theta", 1e6}}, 128, 32768, "");
  const Rope rope = make_rope(parameters, 128, 32768, "");
  EXPECT_DOUBLE_EQ(rope.attention_factor, 0.1 * std::log(4.0) + 1.0);
  EXPECT_EQ(rope.inv_freq.front(), plain.inv_freq.front());
  EXPECT_DOUBLE_EQ(rope.inv_freq.back(), plain.inv_freq.back() / 4.0);
  EXPECT_EQ(rope.max_positions, 131072);
}

TEST(Rope, AttnFactorMultipliesTheMagnitudeOfYarnAsServersDo) {
  Json parameters = {{"rope_type", "yarn"},
                     {"rope_theta", 1e6},
                     {"factor", 4.0},
                     {"attn_factor", 0.8},
                     {"original_max_position_embeddings", 32768}};
  const double magnitude = 0.1 * std::log(4.0) + 1.0;
  const Rope rope = make_rope(parameters, 128, 32768, "");
  EXPECT_DOUBLE_EQ(rope.attention_factor, 0.8 * magnitude);
  EXPECT_EQ(rope.as_run["attention_factor"], rope.attention_factor);
  parameters["attention_factor"] = 1.3;
  EXPECT_THROW(make_rope(parameters, 128, 32768, ""), Error);  // which one is meant?
  parameters["attn_factor"] = 1.0;
  EXPECT_DOUBLE_EQ(make_rope(parameters, 128, 32768, "").attention_factor, 1.3);
  Json linear = {
      {"rope_type", "linear"}, {"rope_theta", 1e6}, {"factor", 4.0}, {"attn_factor", 1.0}};
  EXPECT_EQ(make_rope(linear, 128, 32768, "").attention_factor, 1.0);
  linear["attn_factor"] = 0.8;
  EXPECT_THROW(make_rope(linear, 128, 32768, ""), Error);
}

}  // namespace

// quantization_config: what is read, what is refused by name.

namespace {

using namespace oscar;
using namespace oscar_test;

std::optional<Fp8Layout> parse_layout(const Json& quantization) {
  return parse_quantization({{"quantization_config", quantization}}, "config.json");
}

void expect_refused(const Json& quantization, const std::vector<std::string>& words) {
  try {
    parse_layout(quantization);
    ADD_FAILURE() << quantization.dump() << " was accepted";
  } catch (const Error& error) {
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << word << " is not in: " << error.what();
    }
  }
}

Json changed(Json json, const std::function<void(Json&)>& change) {
  change(json);
  return json;
}

TEST(QuantizationConfig, NoneOrNullMeansPlainWeights) {
  EXPECT_FALSE(parse_quantization(Json::object(), "").has_value());
  EXPECT_FALSE(parse_layout(nullptr).has_value());
}

TEST(QuantizationConfig, BlocksAndTensorsOfFp8AreRead) {
  const auto block = parse_layout({{"quant_method", "fp8"},
                                   {"fmt", "e4m3"},
                                   {"activation_scheme", "dynamic"},
                                   {"scale_fmt", "ue8m0"},
                                   {"weight_block_size", {128, 64}},
                                   {"modules_to_not_convert", {"lm_head"}}});
  EXPECT_EQ(block->layout, ScaleLayout::kBlock);
  EXPECT_EQ(block->block_rows, 128);
  EXPECT_EQ(block->block_columns, 64);
  EXPECT_EQ(block->left_out, std::vector<std::string>{"lm_head"});
  const auto tensor = parse_layout({{"quant_method", "fp8"},
                                    {"activation_scheme", "static"},
                                    {"ignored_layers", {"lm_head", "model.layers.0.mlp.down_proj"}},
                                    {"kv_cache_scheme", "static"},
                                    {"weight_block_size", nullptr}});
  EXPECT_EQ(tensor->layout, ScaleLayout::kTensor);
  EXPECT_EQ(tensor->left_out.size(), 2u);
}

TEST(QuantizationConfig, EveryStrategyOfCompressedFloatsIsRead) {
  EXPECT_EQ(parse_layout(compressed_config("tensor"))->layout, ScaleLayout::kTensor);
  EXPECT_EQ(parse_layout(compressed_config("channel"))->layout, ScaleLayout::kChannel);
  const auto block = parse_layout(changed(compressed_config("block"), [](Json& json) {
    json["config_groups"]["group_0"]["weights"]["block_structure"] = {128, 128};
  }));
  EXPECT_EQ(block->layout, ScaleLayout::kBlock);
  EXPECT_EQ(block->block_columns, 128);
  const Json older = {{"compression_config", compressed_config("channel")}};
  EXPECT_EQ(parse_quantization(older, "")->layout, ScaleLayout::kChannel);
}

TEST(QuantizationConfig, OtherMethodsAreRefusedByNameWithTheWayOut) {
  const std::pair<const char*, const char*> methods[] = {
      {"gptq", "GPTQ"},   {"awq", "AWQ"},           {"bitsandbytes", "4 or 8 bits"},
      {"mxfp4", "MXFP4"}, {"fbgemm_fp8", "FBGEMM"}, {"modelopt_fp4", "NVFP4"},
      {"hqq", "HQQ"},     {"torchao", "torchao"},   {"something-new", "not known"}};
  for (const auto& [method, word] : methods) {
    expect_refused({{"quant_method", method}},
                   {"config.json: quantization_config.quant_method", method, word, "bf16"});
  }
  expect_refused(Json::object(), {"quant_method", "nothing"});
  expect_refused({{"quant_method", 8}}, {"not a name"});
  expect_refused("fp8", {"not a JSON object"});
}

TEST(QuantizationConfig, ModelOptMayWriteOneScaleATensor) {
  const Json flat = {{"quant_method", "modelopt"},
                     {"quant_algo", "FP8"},
                     {"ignore", {"lm_head"}},
                     {"kv_cache_scheme", {{"num_bits", 8}, {"type", "float"}}},
                     {"producer", {{"name", "modelopt"}}},
                     {"config_groups", Json::object()}};
  const Json inner = {
      {"quant_method", "modelopt"},
      {"producer", {{"name", "modelopt"}}},
      {"quantization",
       {{"quant_algo", "FP8"}, {"kv_cache_quant_algo", "FP8"}, {"exclude_modules", {"lm_head"}}}}};
  for (const Json& config : {flat, inner}) {
    const auto layout = parse_layout(config);
    EXPECT_EQ(layout->layout, ScaleLayout::kTensor);
    EXPECT_EQ(layout->scale_suffixes, std::vector<std::string>{"_scale"});
    EXPECT_EQ(layout->left_out, std::vector<std::string>{"lm_head"});
  }
  for (const auto& [algorithm, word] : {std::pair{"NVFP4", "NVFP4"},
                                        {"W4A16_AWQ", "AWQ"},
                                        {"FP8_PB_WO", "in blocks"},
                                        {"A_NEW_ONE", "not known"}}) {
    Json other = flat;
    other["quant_algo"] = algorithm;
    expect_refused(other, {"quantization_config.quant_algo", algorithm, word, "bf16"});
  }
  expect_refused({{"quant_method", "modelopt"}}, {"quant_algo", "nothing"});
}

TEST(QuantizationConfig, ScalesOfTheCacheAloneLeaveTheWeightsAsTheyAre) {
  Json dense = compressed_config("tensor");
  dense["format"] = "dense";
  expect_refused(dense, {"quantization_config.format", "dense"});
  dense["config_groups"] = Json::object();
  EXPECT_FALSE(parse_layout(dense).has_value());
  const Json modelopt = {{"quant_method", "modelopt"}, {"kv_cache_quant_algo", "FP8"}};
  EXPECT_FALSE(parse_layout(modelopt).has_value());
}

TEST(QuantizationConfig, IntegersOfMlxAreRefusedByName) {
  const Json mlx = {{"quantization", {{"group_size", 64}, {"bits", 4}}},
                    {"quantization_config", {{"group_size", 64}, {"bits", 4}}}};
  try {
    parse_quantization(mlx, "config.json");
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("MLX's integers"), std::string::npos) << error.what();
  }
}

TEST(QuantizationConfig, OtherFormatsOfCompressedTensorsAreRefusedByName) {
  const std::pair<const char*, const char*> formats[] = {{"int-quantized", "INT8"},
                                                         {"pack-quantized", "packed integers"},
                                                         {"nvfp4-pack-quantized", "NVFP4"},
                                                         {"mxfp4-pack-quantized", "MXFP4"},
                                                         {"mixed-precision", "several formats"},
                                                         {"a-new-one", "not known"}};
  for (const auto& [format, word] : formats) {
    const std::string name = format;
    expect_refused(changed(compressed_config("tensor"), [&](Json& json) { json["format"] = name; }),
                   {"quantization_config.format", name, word, "bf16"});
  }
}

TEST(QuantizationConfig, ValuesThatChangeTheWeightsAreRefusedByTheirKey) {
  const auto weights = [](Json& json) -> Json& {
    return json["config_groups"]["group_0"]["weights"];
  };
  const std::pair<const char*, std::function<void(Json&)>> cases[] = {
      {"weights.num_bits", [&](Json& json) { weights(json)["num_bits"] = 4; }},
      {"weights.num_bits", [&](Json& json) { weights(json).erase("num_bits"); }},
      {"weights.type", [&](Json& json) { weights(json)["type"] = "int"; }},
      {"weights.symmetric", [&](Json& json) { weights(json)["symmetric"] = false; }},
      {"weights.dynamic", [&](Json& json) { weights(json)["dynamic"] = true; }},
      {"weights.actorder", [&](Json& json) { weights(json)["actorder"] = "group"; }},
      {"weights.group_size", [&](Json& json) { weights(json)["group_size"] = 128; }},
      {"weights.strategy", [&](Json& json) { weights(json)["strategy"] = "group"; }},
      {"weights.strategy", [&](Json& json) { weights(json)["strategy"] = nullptr; }},
      {"weights.block_structure", [&](Json& json) { weights(json)["strategy"] = "block"; }},
      {"weights.some_switch", [&](Json& json) { weights(json)["some_switch"] = 1; }},
      {"group_0.weights", [&](Json& json) { weights(json) = nullptr; }},
      {"group_0.format", [](Json& json) { json["config_groups"]["group_0"]["format"] = "dense"; }},
      {"config_groups", [](Json& json) { json["config_groups"] = Json::object(); }},
      {"config_groups.group_1",
       [&](Json& json) {
         Json other = json["config_groups"]["group_0"];
         other["weights"]["strategy"] = "channel";
         json["config_groups"]["group_1"] = other;
       }},
      {"transform_config",
       [](Json& json) {
         json["transform_config"] = {{"R1", "hadamard"}};
       }},
      {"sparsity_config",
       [](Json& json) {
         json["sparsity_config"] = {{"format", "2:4"}};
       }},
      {"quantization_status", [](Json& json) { json["quantization_status"] = "frozen"; }},
      {"ignore", [](Json& json) { json["ignore"] = "lm_head"; }},
      {"ignore", [](Json& json) { json["ignore"] = {1}; }},
      {"some_switch", [](Json& json) { json["some_switch"] = true; }},
  };
  for (const auto& [key, change] : cases) {
    expect_refused(changed(compressed_config("tensor"), change), {key});
  }
  const std::pair<const char*, Json> values[] = {{"fmt", "e5m2"},
                                                 {"activation_scheme", "other"},
                                                 {"scale_fmt", "e5m2"},
                                                 {"some_switch", 1},
                                                 {"weight_block_size", {128}},
                                                 {"weight_block_size", {0, 128}},
                                                 {"weight_block_size", 1},
                                                 {"weight_block_size", {-128, 128}},
                                                 {"modules_to_not_convert", "a"},
                                                 {"weight_block_size", {uint64_t{1} << 40, 128}}};
  for (const auto& [key, value] : values) {
    Json config = fp8_config();
    config[key] = value;
    expect_refused(config, {std::string("quantization_config.") + key});
  }
  EXPECT_THROW(parse_quantization({{"quantization_config", fp8_config()},
                                   {"compression_config", compressed_config("tensor")}},
                                  ""),
               Error);
}

}  // namespace
