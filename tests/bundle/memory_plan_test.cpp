// Cache sizes against figures worked out by hand, and what is read of a model.
#include "oscar/bundle/memory_plan.h"

#include <gtest/gtest.h>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "bundle/sample.h"
#include "oscar/base/error.h"

namespace {

using namespace oscar;

constexpr int64_t kGiB = int64_t{1} << 30;

CachedModel qwen3_8b() {
  CachedModel m;
  m.name = "Qwen3-8B";
  m.architecture = "Qwen3ForCausalLM";
  m.max_positions = 40960;
  m.weight_bytes = 16381470720;  // 8,190,735,360 parameters of 2 bytes
  m.weight_source = "its safetensors files";
  for (int layer = 0; layer < 36; ++layer) {
    m.layers.push_back({.layer_id = layer,
                        .num_qo_heads = 32,
                        .num_kv_heads = 8,
                        .head_dim_k = 128,
                        .head_dim_v = 128});
  }
  return m;
}

const Json& row_of(const Json& plan, int64_t context) {
  for (const Json& row : plan["contexts"]) {
    if (row["context"] == context) return row;
  }
  throw std::runtime_error("no row of this context");
}

TEST(MemoryPlan, BitsAValueAreThoseWorkedOutByHand) {
  CachedModel m = qwen3_8b();
  m.max_positions = 131072;  // by YaRN
  const Json plan = memory_plan(m, {});
  // (16 x 320 + 2.25 (N - 320)) / N
  EXPECT_NEAR(row_of(plan, 8192)["int2_bits_per_value"].get<double>(), 2.787, 5e-4);
  EXPECT_NEAR(row_of(plan, 32768)["int2_bits_per_value"].get<double>(), 2.384, 5e-4);
  EXPECT_NEAR(row_of(plan, 131072)["int2_bits_per_value"].get<double>(), 2.284, 5e-4);
}

TEST(MemoryPlan, Qwen38bAt128KOn80GiB) {
  CachedModel m = qwen3_8b();
  m.max_positions = 131072;
  const Json plan = memory_plan(m, {.gpu_bytes = 80 * kGiB, .context = 131072, .utilization = 1});
  const Json& row = row_of(plan, 131072);
  EXPECT_EQ(row["bytes_per_token"]["bf16"], 36 * 8 * 256 * 2);
  EXPECT_EQ(row["request_bytes"]["bf16"], 18.0 * kGiB);
  EXPECT_EQ(row["request_bytes"]["fp8"], 9.0 * kGiB);
  // 2,048 pages of 64 tokens, and 64 + 256 + 16 + 1 exact rows beside them.
  EXPECT_EQ(row["request_bytes"]["int2"], 73728.0 * (2.25 * 131072 + 16 * 337) / 8);
  EXPECT_EQ(plan["cache_bytes"], 69517875200.0);
  EXPECT_EQ(row["requests"]["bf16"], 3);
  EXPECT_EQ(row["requests"]["fp8"], 7);
  EXPECT_EQ(row["requests"]["int2"], 25);
  EXPECT_EQ(plan["longest_context"]["bf16"], 131072) << "at most what the model serves";
}

TEST(MemoryPlan, TheLongestContextIsAtMostTheModelsOwn) {
  CachedModel m = qwen3_8b();
  const auto longest = [&](const char* format) {
    const Json plan = memory_plan(m, {.gpu_bytes = 80 * kGiB, .context = 4096, .utilization = 1});
    return plan["longest_context"][format].get<int64_t>();
  };
  EXPECT_EQ(longest("bf16"), 40960);
  m.max_positions = 1 << 22;
  EXPECT_EQ(longest("bf16"), 471448);
  EXPECT_EQ(longest("fp8"), 942896);
  EXPECT_EQ(longest("int2"), 52345 * 64) << "whole pages";
}

// 147,456 bytes a token in BF16, 6 GiB a request of 43,690 tokens.
TEST(MemoryPlan, SaysWhetherSoManyUsersFitAndWhatWould) {
  PlanOptions options{.gpu_bytes = 80 * kGiB, .context = 40960, .users = 12, .utilization = 1};
  Json users = memory_plan(qwen3_8b(), options)["users"];
  EXPECT_EQ(users["requests"], 12);
  EXPECT_TRUE(users["int2"]["fits"]);
  EXPECT_EQ(users["int2"]["gpus"], 1);
  EXPECT_EQ(users["int2"]["tokens_each"], 40960) << "no more than the model serves";
  EXPECT_FALSE(users["bf16"]["fits"]) << "12 requests of 5.625 GiB in 64.7";
  EXPECT_EQ(users["bf16"]["needed_bytes"], 12 * 5.625 * kGiB);
  EXPECT_EQ(users["bf16"]["requests"], 11);
  EXPECT_EQ(users["bf16"]["tokens_each"], 69517875200 / 12 / 147456);
  EXPECT_EQ(users["bf16"]["gpus"], 2);
  options.users = 11;
  EXPECT_TRUE(memory_plan(qwen3_8b(), options)["users"]["bf16"]["fits"]);
  options.utilization = 0.9;
  EXPECT_FALSE(memory_plan(qwen3_8b(), options)["users"]["bf16"]["fits"]);
  EXPECT_FALSE(memory_plan(qwen3_8b(), {.gpu_bytes = 80 * kGiB}).contains("users"));
}

TEST(MemoryPlan, WhatWouldFitLeavesOutWhatWouldNot) {
  const PlanOptions options{.gpu_bytes = 17 * kGiB, .context = 40960, .users = 1, .utilization = 1};
  std::string text = memory_plan_text(memory_plan(qwen3_8b(), options));
  EXPECT_NE(text.find("\n1 request at a time, of 40,960 tokens\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("0 requests"), std::string::npos) << text;
  EXPECT_NE(text.find("up to 2 requests, or 40,960 tokens each"), std::string::npos) << text;
  EXPECT_NE(text.find("tokens each, or 2 GPUs"), std::string::npos) << text;
  // Ranks beyond the KV heads hold copies: the cache of one stays as it is.
  PlanOptions many{.gpu_bytes = 20 * kGiB, .context = 40960, .users = 400, .utilization = 1};
  const Json users = memory_plan(qwen3_8b(), many)["users"];
  EXPECT_FALSE(users["int2"].contains("gpus"));
  many.users = 100;
  EXPECT_EQ(memory_plan(qwen3_8b(), many)["users"]["int2"]["gpus"], 8);
}

TEST(MemoryPlan, UsersNeedToKnowTheWeights) {
  CachedModel m = qwen3_8b();
  m.weight_bytes.reset();
  EXPECT_THROW(memory_plan(m, {.gpu_bytes = 80 * kGiB, .users = 1}), Error);
  EXPECT_NO_THROW(memory_plan(m, {.gpu_bytes = 80 * kGiB, .weight_bytes = kGiB, .users = 1}));
  EXPECT_NO_THROW(memory_plan(m, {.gpu_bytes = 80 * kGiB}));
}

TEST(MemoryPlan, GpusShareWeightsAndWholeHeads) {
  PlanOptions options{.gpu_bytes = 80 * kGiB, .context = 40960, .gpus = 4, .utilization = 1};
  Json plan = memory_plan(qwen3_8b(), options);
  EXPECT_EQ(plan["cache_bytes"], 80.0 * kGiB - 16381470720 / 4);
  EXPECT_EQ(row_of(plan, 40960)["request_bytes"]["bf16"], 5.625 * kGiB / 4);
  EXPECT_EQ(plan["num_kv_heads"], 8);
  options.gpus = 16;  // 8 heads
  plan = memory_plan(qwen3_8b(), options);
  EXPECT_EQ(row_of(plan, 40960)["request_bytes"]["bf16"], 5.625 * kGiB / 8);
}

std::string refusal(const CachedModel& model, int gpus) {
  try {
    memory_plan(model, {.gpu_bytes = 80 * kGiB, .context = 4096, .gpus = gpus});
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(MemoryPlan, GpusThatVllmDoesNotTakeAreRefusedByName) {
  CachedModel m = qwen3_8b();  // 32 query heads, 8 KV heads
  for (const int gpus : {1, 2, 4, 8, 16, 32}) EXPECT_EQ(refusal(m, gpus), "") << gpus;
  for (const int gpus : {3, 5, 6, 12, 24, 64}) {
    EXPECT_NE(refusal(m, gpus).find("1, 2, 4, 8, 16, 32"), std::string::npos) << gpus;
  }
  for (LayerGeometry& layer : m.layers) layer.num_kv_heads = 2, layer.num_qo_heads = 12;
  EXPECT_NE(refusal(m, 3).find("12 query heads"), std::string::npos) << "divides them alone";
  EXPECT_NE(refusal(m, 3).find("1, 2, 4, 6, 12"), std::string::npos) << refusal(m, 3);
  const auto bf16 = [&](int gpus) {
    const Json plan = memory_plan(m, {.gpu_bytes = 80 * kGiB, .context = 4096, .gpus = gpus});
    return row_of(plan, 4096)["request_bytes"]["bf16"].get<double>();
  };
  EXPECT_EQ(bf16(2), bf16(1) / 2);
  EXPECT_EQ(bf16(6), bf16(2)) << "a copy of one head";
}

TEST(MemoryPlan, WhatWouldFitNamesOnlyNumbersOfGpusThatVllmTakes) {
  CachedModel m = qwen3_8b();
  for (LayerGeometry& layer : m.layers) layer.num_kv_heads = 2, layer.num_qo_heads = 12;
  // Of 9 GiB a GPU, weights of 15.3 leave 1.4 in each of 2 and 5.2 in each of 4. A request takes
  // .7 in either: 4 GPUs hold each head twice.
  PlanOptions options{.gpu_bytes = 10 * kGiB, .context = 40960, .users = 7, .gpus = 2};
  EXPECT_EQ(memory_plan(m, options)["users"]["bf16"]["gpus"], 4);
  options.users = 64;
  EXPECT_FALSE(memory_plan(m, options)["users"]["bf16"].contains("gpus")) << "8 do not divide 12";
}

// As in Qwen3-Next-80B: 3 of 4 layers have a state of 32 heads of 128 x 128.
CachedModel with_linear_attention() {
  CachedModel m = qwen3_8b();
  for (LayerGeometry& layer : m.layers) {
    if (layer.layer_id % 4 == 3) continue;
    layer.attention = AttentionKind::kNone;
    layer.quantized = false;
  }
  return m;
}

TEST(MemoryPlan, AStateThatIsNotKnownIsSaidBeforeTheAnswer) {
  const PlanOptions options{.gpu_bytes = 80 * kGiB, .context = 40960, .users = 2};
  const Json plan = memory_plan(with_linear_attention(), options);
  EXPECT_EQ(plan["layers_without_rows"], 27);
  EXPECT_TRUE(plan["state_bytes"].is_null());
  const std::string text = memory_plan_text(plan);
  const size_t said = text.find("NOT COUNTED: 27 layers hold no rows");
  ASSERT_NE(said, std::string::npos) << text;
  EXPECT_LT(said, text.find("2 requests at a time"));
  EXPECT_NE(text.find("docs/vllm.md"), std::string::npos) << text;
  EXPECT_EQ(memory_plan_text(memory_plan(qwen3_8b(), options)).find("NOT COUNTED"),
            std::string::npos);
}

TEST(MemoryPlan, EachRequestHasAStateOfLinearAttentionInEveryFormat) {
  CachedModel m = with_linear_attention();
  const CachedModel without = m;
  m.linear_state = LinearState{.heads = {.num_key_heads = 16,
                                         .num_value_heads = 32,
                                         .key_dim = 128,
                                         .value_dim = 96,
                                         .taps = 4},
                               .recurrent_bytes = 4};
  const double state = 27.0 * ((2 * 16 * 128 + 32 * 96) * 3 * 2 + 32 * 96 * 128 * 4);
  for (const auto format : {CacheKind::kBf16, CacheKind::kFp8, CacheKind::kInt2}) {
    EXPECT_EQ(request_bytes(m, format, 4096), request_bytes(without, format, 4096) + state);
  }
  PlanOptions options{.gpu_bytes = 80 * kGiB, .context = 4096, .gpus = 8};
  EXPECT_EQ(memory_plan(m, options)["state_bytes"], state / 8);
  const Json plan = memory_plan(m, {.context = 4096});
  const Json rows = memory_plan(without, {.context = 4096})["codecs"];
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_NEAR(plan["codecs"][i]["bits_per_value"].get<double>(),
                rows[i]["bits_per_value"].get<double>(), 1e-9)
        << "of rows alone";
  }
  const std::string text = memory_plan_text(plan);
  EXPECT_NE(text.find("state       0.041 GiB a request for linear attention in 27 layers"),
            std::string::npos)
      << text;
  EXPECT_NE(refusal(m, 32), "") << "16 key heads are not copied";
}

TEST(MemoryPlan, TheAnswerComesFirstAndIsOfTheModelsContextWhereMoreIsAsked) {
  PlanOptions options{.gpu_bytes = 80 * kGiB, .context = 131072, .users = 16};
  const Json plan = memory_plan(qwen3_8b(), options);
  EXPECT_EQ(plan["context"], 40960);
  EXPECT_EQ(plan["asked_context"], 131072);
  EXPECT_EQ(plan["contexts"].back()["context"], 40960);
  std::string text = memory_plan_text(plan);
  EXPECT_NE(text.find("16 requests at a time, of 40,960 tokens (it does not serve 131,072)\n"
                      "INT2        fits: "),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("not the 131,072 of --context: planned for 40,960."), std::string::npos);
  EXPECT_NE(text.find("what would: 10 requests, or "), std::string::npos) << text;
  EXPECT_LT(text.find("what would"), text.find("One request"));
  options.gpus = 2;
  text = memory_plan_text(memory_plan(qwen3_8b(), options));
  EXPECT_NE(text.find("in each of 2 GPUs"), std::string::npos) << text;
}

TEST(MemoryPlan, WithoutAContextItIsTheModelsOwn) {
  const Json plan = memory_plan(qwen3_8b(), {});
  EXPECT_EQ(plan["context"], 40960);
  EXPECT_EQ(plan["contexts"].back()["context"], 40960);
  EXPECT_FALSE(plan.contains("gpu_bytes"));
  EXPECT_FALSE(plan["contexts"][0].contains("requests"));
}

TEST(MemoryPlan, TheSweepSaysWhatGroupsMetadataAndWindowsCost) {
  const Json plan = memory_plan(qwen3_8b(), {.context = 8192});
  const auto bits = [&](int group, const char* metadata, int sink, int recent) {
    for (const Json& row : plan["sweep"]) {
      if (row["quant_group_size"] == group && row["metadata_dtype"] == metadata &&
          row["sink_tokens"] == sink && row["recent_tokens"] == recent) {
        return row["int2_bits_per_value"].get<double>();
      }
    }
    return 0.0;
  };
  EXPECT_TRUE(plan["sweep"][0]["is_planned"]);
  EXPECT_DOUBLE_EQ(bits(128, "fp16", 64, 256), (16 * 320 + 2.25 * 7872) / 8192);
  EXPECT_DOUBLE_EQ(bits(32, "fp16", 64, 256), (16 * 320 + 3.0 * 7872) / 8192);
  EXPECT_DOUBLE_EQ(bits(128, "fp32", 64, 256), (16 * 320 + 2.5 * 7872) / 8192);
  EXPECT_DOUBLE_EQ(bits(128, "fp16", 0, 64), (16 * 64 + 2.25 * 8128) / 8192);
}

TEST(MemoryPlan, SlidingLayersHoldTheirWindowAndShortOnesStayInBf16) {
  CachedModel m = qwen3_8b();
  m.layers.resize(2);
  m.layers[0].sliding_window = 128;
  m.layers[0].quantized = false;
  m.layers[1].sliding_window = 1024;
  const double row_values = 8 * 256;
  EXPECT_EQ(request_bytes(m, CacheKind::kBf16, 100000), row_values * 2 * (128 + 1024));
  EXPECT_EQ(request_bytes(m, CacheKind::kInt2, 100000),
            row_values * (2 * 128 + (16 * 337 + 2.25 * 1024) / 8));
}

TEST(MemoryPlan, AShortRequestHasItsWindowsInFullAndALongOnesLastPage) {
  CachedModel m = qwen3_8b();
  m.layers.resize(1);
  const double row_values = 8 * 256;
  const auto bytes = [&](int64_t tokens) { return request_bytes(m, CacheKind::kInt2, tokens); };
  EXPECT_EQ(bytes(1), row_values * (16 * 337 + 2.25 * 64) / 8);
  EXPECT_EQ(bytes(64), bytes(1));
  EXPECT_EQ(bytes(65), bytes(1) + row_values * 2.25 * 64 / 8);
  m.quantizer.demote_block = 64;
  EXPECT_EQ(bytes(1), row_values * (16 * (64 + 256 + 64 + 1) + 2.25 * 64) / 8);
}

TEST(MemoryPlan, LocalLayersStayInBf16HoweverFewTokensAreRecent) {
  CachedModel m = qwen3_8b();
  m.layers.resize(2);
  m.layers[0].attention = AttentionKind::kLocal;
  m.layers[0].sliding_window = 1024;
  m.layers[0].quantized = false;
  m.max_positions = 100000;
  PlanOptions options;
  options.context = 100000;
  const Json plan = memory_plan(m, options);
  const double row_values = 8 * 256;
  for (const Json& row : plan["sweep"]) {
    const double metadata = row["metadata_dtype"] == "fp32" ? 64 : 32;
    const double row_bits = 2 + metadata / row["quant_group_size"].get<int>();
    const int window = row["sink_tokens"].get<int>() + row["recent_tokens"].get<int>() + 17;
    const double own = (row_bits * 100032 + 16 * window) / 8;
    EXPECT_DOUBLE_EQ(row["request_bytes"].get<double>(), row_values * (2 * 1024 + own));
  }
}

TEST(MemoryPlan, WhereNoLayerIsQuantizedRowsHave16Bits) {
  CachedModel m = qwen3_8b();
  for (LayerGeometry& layer : m.layers) layer.sliding_window = 128, layer.quantized = false;
  const Json plan = memory_plan(m, {.context = 4096});
  EXPECT_EQ(row_of(plan, 4096)["int2_bits_per_value"], 16);
  EXPECT_EQ(row_of(plan, 4096)["request_bytes"]["int2"],
            row_of(plan, 4096)["request_bytes"]["bf16"]);
  for (const Json& row : plan["sweep"]) {
    const bool quantized = row["recent_tokens"] == 64;  // fewer than the windows hold
    EXPECT_EQ(row["int2_bits_per_value"] < 16, quantized) << row;
  }
  EXPECT_NE(memory_plan_text(plan).find("no layer is quantized"), std::string::npos);
}

TEST(MemoryPlan, LinesFit80Columns) {
  CachedModel m = qwen3_8b();
  m.name = std::string(50, 'n');
  std::istringstream text(memory_plan_text(
      memory_plan(m, {.gpu_bytes = 8000 * kGiB, .context = 1 << 20, .users = 123456, .gpus = 32})));
  for (std::string line; std::getline(text, line);) EXPECT_LE(line.size(), 80U) << line;
}

TEST(MemoryPlan, WeightsThatFillTheGpuAndUnknownLengthsAreRefused) {
  EXPECT_THROW(memory_plan(qwen3_8b(), {.gpu_bytes = 15 * kGiB}), Error);
  CachedModel m = qwen3_8b();
  m.max_positions = 0;
  EXPECT_THROW(memory_plan(m, {}), Error);
  EXPECT_NO_THROW(memory_plan(m, {.context = 4096}));
}

using MemoryPlanFiles = sample::BundleTest;

constexpr const char* kQwen3_8b = R"({"architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "attention_bias": false})";

std::string quantized_by(const std::string& section) {
  return std::string(kQwen3_8b).insert(1, "\"quantization_config\": " + section + ", ");
}

// A safetensors file of so many bytes: one tensor of bytes, or none in the smallest.
std::string sound_file(size_t bytes) {
  constexpr size_t kHeader = 88, kLength = 8;
  const size_t header = bytes < kHeader + kLength ? bytes - kLength : kHeader;
  const size_t data = bytes - kLength - header;
  std::string text = "{}";
  if (data > 0) {
    text = R"({"w": {"dtype": "U8", "shape": [)" + std::to_string(data) +
           R"(], "data_offsets": [0, )" + std::to_string(data) + "]}}";
  }
  text.resize(header, ' ');
  std::string length(kLength, '\0');
  length[0] = static_cast<char>(header);
  return length + text + std::string(data, 'x');
}

TEST_F(MemoryPlanFiles, WeightsAreTheFilesThatALoaderReads) {
  std::ofstream(file("config.json")) << kQwen3_8b;
  const auto write = [&](const char* name, size_t bytes) {
    std::ofstream(file(name)) << sound_file(bytes);
  };
  const auto bytes = [&] { return read_cached_model(folder_.string()).weight_bytes; };
  write("consolidated.safetensors", 1000);
  EXPECT_EQ(bytes(), 1000) << "Mistral's file alone";
  write("model-00001-of-00003.safetensors", 400);
  write("model-00003-of-00003.safetensors", 100);
  EXPECT_EQ(bytes(), std::nullopt) << "by the names of the others";
  std::ofstream(file("model.safetensors.index.json")) << R"({"weight_map": {
    "a": "model-00001-of-00003.safetensors", "b": "model-00002-of-00003.safetensors",
    "c": "model-00003-of-00003.safetensors", "d": "model-00003-of-00003.safetensors"}})";
  CachedModel m = read_cached_model(folder_.string());
  EXPECT_EQ(m.weight_bytes, std::nullopt);
  const std::string text = memory_plan_text(memory_plan(m, {.gpu_bytes = 80 * kGiB}));
  EXPECT_NE(text.find("not counted: 1 of the 3 shards that the index names are missing"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("model-00002-of-00003.safetensors"), std::string::npos) << text;
  EXPECT_NE(text.find("--weights"), std::string::npos) << text;
  EXPECT_THROW(memory_plan(m, {.gpu_bytes = 80 * kGiB, .users = 1}), Error);
  write("model-00002-of-00003.safetensors", 500);
  EXPECT_EQ(bytes(), 1000) << "and not Mistral's file once more";
  write("model.safetensors", 777);
  EXPECT_EQ(bytes(), 777) << "as the engines read them";
}

TEST_F(MemoryPlanFiles, FilesThatHoldNoWholeWeightsAreRefused) {
  std::ofstream(file("config.json")) << kQwen3_8b;
  const auto refusal = [&](const std::string& name, const std::string& bytes) -> std::string {
    std::ofstream(file(name.c_str())) << bytes;
    try {
      read_cached_model(folder_.string());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto expect = [](const std::string& said, std::initializer_list<const char*> words) {
    for (const char* word : words) EXPECT_NE(said.find(word), std::string::npos) << said;
  };
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, 'a') +
      "\nsize 4000000000\n";
  expect(refusal("model-1-of-1.safetensors", pointer), {"pointer of Git LFS", "model-1-of-1"});
  expect(refusal("model.safetensors", pointer), {"pointer of Git LFS", "git lfs pull"});
  expect(refusal("model.safetensors", sound_file(1000).substr(0, 900)),
         {"lies outside the file", "model.safetensors", "damaged or incomplete"});
  expect(refusal("model.safetensors", ""), {"file is empty"});
  EXPECT_EQ(refusal("model.safetensors", sound_file(1000)), "");
}

TEST_F(MemoryPlanFiles, WithoutFilesTheQuantizationsBitsAreCounted) {
  const auto read = [&](const std::string& section) {
    std::ofstream(file("config.json")) << quantized_by(section);
    return read_cached_model(folder_.string());
  };
  constexpr double kLayers = 36;
  constexpr double kMatrices = 2.0 * 4096 * 4096 + 2.0 * 1024 * 4096 + 3.0 * 12288 * 4096;
  constexpr double kInputs = 6 * 4096 + 12288;  // of seven matrices
  constexpr double kRest = 16381470720 - kLayers * 2 * kMatrices;
  const double groups = kMatrices / 128 * (2 + 0.5);
  CachedModel m =
      read(R"({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"})");
  EXPECT_EQ(m.weight_bytes, kRest + kLayers * (kMatrices / 2 + groups));
  EXPECT_EQ(m.weight_source, "by config.json, layers in AWQ's 4 bits");
  m = read(R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false})");
  EXPECT_EQ(m.weight_bytes, kRest + kLayers * (kMatrices / 2 + groups + 4 * kInputs));
  m = read(R"({"quant_method": "awq", "bits": 4, "group_size": 128,
               "modules_to_not_convert": ["down_proj"]})");
  constexpr double kDown = 12288.0 * 4096;
  EXPECT_EQ(m.weight_bytes, kRest + kLayers * ((kMatrices - kDown) * (.5 + 2.5 / 128) + 2 * kDown));
  for (const char* section :
       {R"({"quant_method": "bitsandbytes", "load_in_4bit": true})", R"({"quant_method": "awq"})",
        R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:q": {}}})",
        R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": true})", "[]"}) {
    m = read(section);
    EXPECT_EQ(m.weight_bytes, std::nullopt) << section;
    EXPECT_NE(m.weight_source.find("does not tell the bits"), std::string::npos) << section;
  }
}

TEST_F(MemoryPlanFiles, OfLinearAttentionTheConfigTellsTheState) {
  std::ofstream(file("config.json")) << R"({"architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144,
    "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4})";
  CachedModel m = read_cached_model(folder_.string());
  EXPECT_GT(m.weight_bytes.value_or(0), int64_t{140} << 30) << "80B in BF16";
  // 36 layers of 3 x 8192 inputs and 32 x 128 x 128 numbers, in bf16; 12 of 2 heads of 256.
  EXPECT_EQ(request_bytes(m, CacheKind::kBf16, 1000),
            36.0 * (3 * 8192 * 2 + 32 * 128 * 128 * 2) + 12.0 * 1000 * 2 * 512 * 2);
  EXPECT_EQ(memory_plan(m, {.context = 4096})["layers_without_rows"], 36);
  std::ofstream(file("config.json")) << R"({
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
    "text_config": {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32"}})";
  m = read_cached_model(folder_.string());
  EXPECT_EQ(request_bytes(m, CacheKind::kInt2, 0), 3 * 8192 * 2 + 32 * 128 * 128 * 4);
}

TEST_F(MemoryPlanFiles, OfAFolderTheConfigAndTheWeightsSizesAreRead) {
  std::ofstream(file("config.json")) << kQwen3_8b;
  CachedModel m = read_cached_model(folder_.string());
  EXPECT_EQ(m.weight_bytes, 16381470720);
  EXPECT_EQ(m.max_positions, 40960);
  EXPECT_EQ(m.layers.size(), 36U);
  EXPECT_EQ(m.quantizer.quant_group_size, 128);
  std::ofstream(file("model-1.safetensors")) << sound_file(1000);
  std::ofstream(file("model-2.safetensors")) << sound_file(24);
  m = read_cached_model(folder_.string());
  EXPECT_EQ(m.weight_bytes, 1024);
  EXPECT_EQ(m.weight_source, "its safetensors files");
  std::ofstream(file("config.json")) << quantized_by(R"({"quant_method": "awq", "bits": 4})");
  EXPECT_EQ(read_cached_model(folder_.string()).weight_bytes, 1024) << "as stored";
  std::ofstream(file("config.json")) << R"({"architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", "num_hidden_layers": 2,
    "quantization_config": {"quant_method": "awq", "bits": 4}}})";
  EXPECT_EQ(read_cached_model(folder_.string()).layers.size(), 2U) << "also of a text half";
}

TEST_F(MemoryPlanFiles, OfABundleItsOwnQuantizerCounts) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.quantizer.recent_tokens = 100;
  bundle.model.rope["max_positions"] = 2048;
  write_bundle(bundle, file("a.h5"), false);
  const CachedModel m = read_cached_model(file("a.h5").string());
  EXPECT_EQ(m.quantizer, bundle.quantizer);
  EXPECT_EQ(m.max_positions, 2048);
  EXPECT_FALSE(m.weight_bytes.has_value());
  const std::string text = memory_plan_text(memory_plan(m, {.gpu_bytes = kGiB}));
  EXPECT_NE(text.find("not counted"), std::string::npos) << text;
}

}  // namespace
