// quantization_config: what is read, what is refused by name.
#include "oscar/checkpoint/quantization_config.h"

#include <gtest/gtest.h>

#include <functional>

#include "checkpoint/fp8_folder.h"
#include "oscar/base/error.h"

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
      {"gptq", "GPTQ"},   {"awq", "AWQ"},           {"bitsandbytes", "model.dequantize()"},
      {"mxfp4", "MXFP4"}, {"modelopt", "ModelOpt"}, {"fbgemm_fp8", "FBGEMM"},
      {"hqq", "HQQ"},     {"torchao", "torchao"},   {"something-new", "not known"}};
  for (const auto& [method, word] : methods) {
    expect_refused({{"quant_method", method}},
                   {"config.json: quantization_config.quant_method", method, word, "bf16"});
  }
  expect_refused(Json::object(), {"quant_method", "nothing"});
  expect_refused({{"quant_method", 8}}, {"not a name"});
  expect_refused("fp8", {"not a JSON object"});
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
