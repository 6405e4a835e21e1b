// config.json: what is read, what is refused by name, and what the sizes must be.
#include "oscar/checkpoint/model_config.h"

#include <gtest/gtest.h>

#include <cmath>

#include "oscar/base/error.h"

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

TEST(ModelConfig, NamesTheWayForAModelOfImagesAndText) {
  Json config = base("gemma3", "Gemma3ForConditionalGeneration");
  config["text_config"] = Json::object();
  EXPECT_NE(refusal(config).find("docs/models.md"), std::string::npos);
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

}  // namespace
