// A GGUF file as a checkpoint: its configuration, its weights by config.json's names, its hashes.
#include "oscar/model/checkpoint/gguf_model.h"

#include <gtest/gtest.h>
#include <cstdlib>

#include "io/gguf_bytes.h"
#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/sha256.h"
#include "oscar/model/checkpoint/checkpoint.h"
#include "oscar/model/checkpoint/weights.h"

namespace {

using namespace oscar;
using namespace oscar_test;

std::vector<float> counting(size_t count, float first = 0) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = first + static_cast<float>(i);
  return values;
}

// One layer, hidden 8, two query heads and one KV head of 4, 16 tokens; q counts its rows.
struct SmallGguf {
  GgufBuilder metadata, tensors;
  std::string arch;

  explicit SmallGguf(const std::string& architecture = "llama") : arch(architecture) {
    metadata.text("general.architecture", arch);
    integer("block_count", 1).integer("context_length", 64).integer("embedding_length", 8);
    integer("feed_forward_length", 8).integer("attention.head_count", 2);
    integer("attention.head_count_kv", 1);
    metadata.number(arch + ".attention.layer_norm_rms_epsilon", 1e-5f);
    metadata.number(arch + ".rope.freq_base", 1e7f);
    tensors.f32("token_embd.weight", {8, 16}, counting(128));
    tensors.f32("output_norm.weight", {8}, counting(8));
    for (const char* name : {"attn_norm", "ffn_norm"}) {
      tensors.f32(std::string("blk.0.") + name + ".weight", {8}, counting(8));
    }
    std::vector<float> rows;
    for (int row = 0; row < 8; ++row) rows.insert(rows.end(), 8, static_cast<float>(row));
    tensors.f32("blk.0.attn_q.weight", {8, 8}, rows);
    tensors.f32("blk.0.attn_k.weight", {8, 4}, {rows.begin(), rows.begin() + 32});
    tensors.f32("blk.0.attn_v.weight", {8, 4}, {rows.begin(), rows.begin() + 32});
    for (const char* name : {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}) {
      tensors.f32(std::string("blk.0.") + name + ".weight", {8, 8}, rows);
    }
  }

  struct Keys {
    SmallGguf& file;
    Keys integer(const std::string& key, uint32_t value) const {
      file.metadata.integer(file.arch + "." + key, value);
      return *this;
    }
  };
  Keys integer(const std::string& key, uint32_t value) { return Keys{*this}.integer(key, value); }

  std::string bytes() const {
    GgufBuilder whole = tensors;
    whole.values = metadata.values;
    return whole.bytes();
  }
};

class GgufCheckpoint : public testing::Test {
 protected:
  Checkpoint open(const SmallGguf& file, const std::optional<Json>& rope_scaling = {}) const {
    write_file(path(), file.bytes());
    return open_checkpoint(path().string(), rope_scaling);
  }
  std::filesystem::path path() const { return folder_.path() / "small.Q8_0.gguf"; }

  std::string refusal(const SmallGguf& file) const {
    try {
      const Checkpoint checkpoint = open(file);
      check_weights(checkpoint.config, *checkpoint.weights);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
  void expect_refused(const SmallGguf& file, std::initializer_list<const char*> words) const {
    const std::string text = refusal(file);
    for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << text;
  }

  TemporaryFolder folder_;
};

TEST_F(GgufCheckpoint, HasTheConfigurationThatConfigJsonWouldGive) {
  const ModelConfig config = open(SmallGguf()).config;
  EXPECT_EQ(config.architecture, "LlamaForCausalLM");
  EXPECT_EQ(config.num_layers, 1);
  EXPECT_EQ(config.hidden_size, 8);
  EXPECT_EQ(config.num_qo_heads, 2);
  EXPECT_EQ(config.num_kv_heads, 1);
  EXPECT_EQ(config.head_dim, 4);
  EXPECT_EQ(config.vocab_size, 16);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_FALSE(config.layer(0).attention.qkv_bias);
  EXPECT_EQ(config.rope.theta, 1e7);
  EXPECT_EQ(config.rope.max_positions, 64);
  EXPECT_EQ(config.bos_token_id, std::nullopt);
  EXPECT_TRUE(config.eos_token_ids.empty());
}

TEST_F(GgufCheckpoint, TakesHeadSizeTokensAndOutputMatrixWhereTheFileHasThem) {
  SmallGguf file("qwen3");
  file.integer("attention.key_length", 4).integer("attention.value_length", 4);
  file.metadata.integer("tokenizer.ggml.bos_token_id", 3);
  file.metadata.integer("tokenizer.ggml.eos_token_id", 4);
  file.metadata.integer("tokenizer.ggml.eot_token_id", 5);
  file.tensors.f32("output.weight", {8, 16}, counting(128));
  file.tensors.f32("blk.0.attn_q_norm.weight", {4}, counting(4));
  file.tensors.f32("blk.0.attn_k_norm.weight", {4}, counting(4));
  EXPECT_EQ(refusal(file), "accepted");
  const ModelConfig config = open(file).config;
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_TRUE(config.layer(0).attention.qk_norm);
  EXPECT_EQ(config.bos_token_id, 3);
  EXPECT_EQ(config.eos_token_ids, (std::vector<int32_t>{4, 5}));
}

TEST_F(GgufCheckpoint, RowsOfQAndKComeInTheOrderOfHalves) {
  const auto rows_of = [](const Checkpoint& checkpoint, const char* name, int64_t rows) {
    const TensorView view = checkpoint.weights->get(name, {rows, 8});
    std::vector<float> values(static_cast<size_t>(rows) * 8), first;
    if (view.decode) {
      view.decode(0, rows, values.data());
    } else {
      std::memcpy(values.data(), view.data, values.size() * sizeof(float));
    }
    for (size_t row = 0; row < size_t(rows); ++row) first.push_back(values[row * 8]);
    return first;
  };
  const Checkpoint llama = open(SmallGguf());
  const char* q = "model.layers.0.self_attn.q_proj.weight";
  EXPECT_EQ(rows_of(llama, q, 8), (std::vector<float>{0, 2, 1, 3, 4, 6, 5, 7}));
  EXPECT_EQ(rows_of(llama, "model.layers.0.self_attn.k_proj.weight", 4),
            (std::vector<float>{0, 2, 1, 3}));
  EXPECT_EQ(rows_of(llama, "model.layers.0.self_attn.v_proj.weight", 4), counting(4));
  float part[16];
  llama.weights->get(q, {8, 8}).decode(5, 2, part);
  EXPECT_EQ(part[0], 6.0f);
  EXPECT_EQ(part[8], 5.0f);
  const Checkpoint qwen = open(SmallGguf("qwen2"));
  EXPECT_EQ(rows_of(qwen, q, 8), counting(8));
}

TEST_F(GgufCheckpoint, BiasesOfQAndKComeInTheOrderOfHalves) {
  SmallGguf file;
  for (const auto& [name, size] : {std::pair{"q", 8}, {"k", 4}, {"v", 4}, {"output", 8}}) {
    file.tensors.f32(std::string("blk.0.attn_") + name + ".bias", {uint64_t(size)},
                     counting(size_t(size)));
  }
  EXPECT_EQ(refusal(file), "accepted");
  const Checkpoint checkpoint = open(file);
  EXPECT_TRUE(checkpoint.config.layer(0).attention.qkv_bias);
  float values[8];
  checkpoint.weights->get("model.layers.0.self_attn.q_proj.bias", {8}).decode(0, 1, values);
  EXPECT_EQ(std::vector<float>(values, values + 8), (std::vector<float>{0, 2, 1, 3, 4, 6, 5, 7}));
}

TEST_F(GgufCheckpoint, RefusesOtherModelsByName) {
  expect_refused(SmallGguf("gemma3"), {"architecture is not supported", "llama", "gemma3"});
  SmallGguf nameless;
  nameless.metadata.values.erase(nameless.metadata.values.begin());
  expect_refused(nameless, {"architecture is not supported", "nothing"});
  const auto with = [](auto&& change) {
    SmallGguf file;
    change(file);
    return file;
  };
  const auto number = [&](const char* key, uint32_t value) {
    return with([&](SmallGguf& file) { file.integer(key, value); });
  };
  expect_refused(number("expert_count", 8), {"mixture of experts", "llama.expert_count"});
  EXPECT_EQ(refusal(number("expert_count", 0)), "accepted");
  expect_refused(number("attention.sliding_window", 4096), {"sliding window"});
  expect_refused(number("attention.value_length", 2), {"heads of another size"});
  expect_refused(number("rope.dimension_count", 2), {"heads of another size"});
  expect_refused(number("ssm.state_size", 2), {"does not know", "llama.ssm.state_size"});
  expect_refused(with([](SmallGguf& file) { file.metadata.flag("llama.attention.causal", false); }),
                 {"later tokens"});
  expect_refused(with([](SmallGguf& file) { file.metadata.text("general.type", "adapter"); }),
                 {"holds no model", "adapter"});
  expect_refused(with([](SmallGguf& file) { file.metadata.integer("split.count", 3); }),
                 {"split over several", "merge"});
  expect_refused(
      with([](SmallGguf& file) { file.metadata.text("llama.rope.scaling.type", "longrope"); }),
      {"RoPE scaling is not implemented", "longrope"});
}

TEST_F(GgufCheckpoint, RefusesMissingAndImpossibleSizes) {
  const std::pair<const char*, const char*> keys[] = {
      {"block_count", "num_hidden_layers"},
      {"embedding_length", "hidden_size"},
      {"feed_forward_length", "intermediate_size"},
      {"context_length", "max_position_embeddings"}};
  for (size_t i = 0; i < std::size(keys); ++i) {
    SCOPED_TRACE(keys[i].first);
    SmallGguf missing;
    auto& values = missing.metadata.values;
    std::erase_if(values, [&](const std::string& value) {
      return value.find(std::string(".") + keys[i].first) != std::string::npos;
    });
    expect_refused(missing, {"a key of the model is missing", keys[i].first});
    SmallGguf huge = missing;
    huge.metadata.add("llama." + std::string(keys[i].first), GgufType::kUint64,
                      bytes_of(uint64_t{1} << 62));
    expect_refused(huge, {"small.Q8_0.gguf"});
    SmallGguf negative = missing;
    negative.metadata.add("llama." + std::string(keys[i].first), GgufType::kInt32,
                          bytes_of(int32_t{-1}));
    expect_refused(negative, {"small.Q8_0.gguf"});
    SmallGguf text = missing;
    text.metadata.text("llama." + std::string(keys[i].first), "8");
    expect_refused(text, {"another type", keys[i].first});
  }
}

TEST_F(GgufCheckpoint, RefusesTensorsThatAreMissingMisshapenOrUnaccountedFor) {
  SmallGguf file;
  file.tensors.tensors[4].name = "blk.0.attn_x.weight";
  expect_refused(file, {"a tensor of the model is missing", "q_proj"});
  file = SmallGguf();
  file.tensors.tensors[4].dimensions = {4, 16};
  expect_refused(file, {"another shape", "blk.0.attn_q.weight"});
  file = SmallGguf();
  file.tensors.f32("blk.0.attn_q_norm.weight", {4}, counting(4));
  expect_refused(file, {"does not account for", "attn_q_norm"});
  file = SmallGguf();
  file.tensors.tensors[5].type = 27;  // 64-bit integers
  file.tensors.tensors[5].dimensions = {8, 2};
  expect_refused(file, {"another shape"});
}

TEST_F(GgufCheckpoint, NamesTheTypesThatCannotBeLoaded) {
  SmallGguf file;
  GgufBuilder tensors;
  for (const GgufTestTensor& tensor : file.tensors.tensors) {
    const bool changed = tensor.name == "output_norm.weight";
    size_t values = 1;
    for (const uint64_t size : tensor.dimensions) values *= size;
    tensors.tensor(tensor.name, tensor.dimensions, changed ? 26 : 0, std::string(values * 4, '\0'));
  }
  file.tensors = tensors;
  expect_refused(file, {"of this type cannot be loaded", "output_norm.weight", "I32", "Q6_K"});
}

TEST_F(GgufCheckpoint, FactorsOfRopeAreKnownAsLlama3WhereTheyAreThat) {
  SmallGguf file;
  file.tensors.f32("rope_freqs.weight", {2}, {1, 8});
  EXPECT_EQ(refusal(file), "accepted");
  Rope rope = open(file).config.rope;
  EXPECT_EQ(rope.type, "llama3");
  EXPECT_EQ(rope.as_run["factor"], 8.0);
  EXPECT_EQ(rope.as_run["original_max_position_embeddings"], 8192);
  file = SmallGguf();
  file.tensors.f32("rope_freqs.weight", {2}, {2, 3});
  rope = open(file).config.rope;
  EXPECT_EQ(rope.type, "freq_factors");
  const Rope plain = open(SmallGguf()).config.rope;
  EXPECT_EQ(rope.inv_freq[0], plain.inv_freq[0] / 2);
  EXPECT_EQ(rope.inv_freq[1], plain.inv_freq[1] / 3);
  for (const float wrong : {0.0f, -1.0f, INFINITY, NAN}) {
    file = SmallGguf();
    file.tensors.f32("rope_freqs.weight", {2}, {1, wrong});
    expect_refused(file, {"rope_freqs.weight"});
  }
  file = SmallGguf();
  file.tensors.f32("rope_freqs.weight", {3}, {1, 1, 1});
  expect_refused(file, {"rope_freqs.weight", "another shape"});
}

TEST_F(GgufCheckpoint, IsNamedAfterItsFileAndHashed) {
  SmallGguf file;
  file.metadata.text("tokenizer.chat_template", "{{ messages }}");
  file.metadata.texts("tokenizer.ggml.tokens", {"a", "b"});
  file.metadata.integer("tokenizer.ggml.bos_token_id", 1);
  const Checkpoint checkpoint = open(file);
  EXPECT_TRUE(checkpoint.is_gguf());
  EXPECT_EQ(checkpoint.name, "small.Q8_0");
  EXPECT_EQ(checkpoint.folder, folder_.path());
  EXPECT_EQ(checkpoint.chat_template_sha256, sha256_of("{{ messages }}"));
  const ChatTemplate read = read_chat_template(path());
  EXPECT_EQ(read.texts.at("default"), "{{ messages }}");
  EXPECT_EQ(read.special_tokens, (std::map<std::string, std::string>{{"bos_token", "b"}}));
  EXPECT_EQ(checkpoint.weights->quantization(), "F32 (11 tensors)");
  EXPECT_EQ(checkpoint.weights->place("model.norm.weight"),
            path().string() + ": output_norm.weight");

  // Asked now: the file is written anew below.
  const std::string config = checkpoint.config_sha256, tokenizer = checkpoint.tokenizer_sha256;
  const std::string weights = checkpoint.weights->fingerprint(false);

  file.metadata.integer("general.quantization_version", 2);  // of no importance
  const Checkpoint retold = open(file);
  EXPECT_EQ(retold.config_sha256, config);
  EXPECT_EQ(retold.tokenizer_sha256, tokenizer);
  EXPECT_EQ(retold.weights->fingerprint(false), weights);
  file.metadata.texts("tokenizer.ggml.merges", {"a b"});
  file.tensors.data[40] ^= 1;
  const Checkpoint changed = open(file);
  EXPECT_NE(changed.tokenizer_sha256, tokenizer);
  EXPECT_NE(changed.weights->fingerprint(false), weights);
}

TEST_F(GgufCheckpoint, ARopeScalingOfTheCommandLineReplacesTheFiles) {
  SmallGguf file;
  file.tensors.f32("rope_freqs.weight", {2}, {1, 8});
  const Json linear = {{"rope_type", "linear"}, {"factor", 2.0}};
  const Rope rope = open(file, linear).config.rope;
  EXPECT_EQ(rope.type, "linear");
  EXPECT_EQ(rope.theta, 1e7);
}

TEST_F(GgufCheckpoint, IsFoundByTheNameOfAFolderThatHoldsItAlone) {
  const auto folder = folder_.path() / "named";
  std::filesystem::create_directories(folder);
  write_file(folder / "x.gguf", SmallGguf().bytes());
  ::setenv("OSCAR_DATASETS", folder_.path().c_str(), 1);
  EXPECT_EQ(find_model("named"), folder / "x.gguf");
  write_file(folder / "y.gguf", "");
  EXPECT_THROW(find_model("named"), Error);
  ::unsetenv("OSCAR_DATASETS");
}

TEST_F(GgufCheckpoint, AFileOfAnotherKindIsNoModel) {
  write_file(path(), "not a model at all");
  try {
    open_checkpoint(path().string());
    FAIL() << "it was opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.info().what, "not a GGUF file");
  }
}

}  // namespace
