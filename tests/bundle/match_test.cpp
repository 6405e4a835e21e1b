#include "oscar/bundle/match.h"

#include <gtest/gtest.h>
#include <functional>

#include "bundle/sample.h"
#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/cache/numeric.h"

// A bundle is matched with its model field by field, as far as it stores them.

namespace {

using namespace oscar;
using namespace oscar_test;

constexpr const char* kConfig =
    R"({"model_type":"qwen3","hidden_size":8,"intermediate_size":8,"num_hidden_layers":2,
        "num_attention_heads":2,"num_key_value_heads":1,"head_dim":4,"vocab_size":16})";

class BundleMatch : public testing::Test {
 protected:
  BundleMatch() {
    write_file(folder_.path() / "config.json", kConfig);
    write_file(folder_.path() / "model.safetensors", safetensors_bytes({{"a", {{1}, {1.0f}}}}));
    checkpoint_ = open_checkpoint(folder_.path().string());
    const ModelConfig& config = checkpoint_.config;
    bundle_.model = describe_model(checkpoint_, false);
    for (int layer = 0; layer < config.num_layers; ++layer) {
      bundle_.layers.emplace_back().geometry = config.geometry(layer, 256);
      bundle_.statistics.emplace_back().geometry = config.geometry(layer, 256);
    }
  }

  // The error's parts, or the warning.
  std::string verdict() const {
    try {
      return check_bundle_matches(bundle_, checkpoint_, "b.h5");
    } catch (const Error& error) {
      return error.what();
    }
  }
  void expect(std::initializer_list<const char*> words) const {
    const std::string text = verdict();
    for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << text;
  }

  TemporaryFolder folder_;
  Checkpoint checkpoint_;
  Bundle bundle_;
};

TEST_F(BundleMatch, ABundleOfTheModelIsTakenWithoutAWord) { EXPECT_EQ(verdict(), ""); }

TEST_F(BundleMatch, TheRecentWindowIsNoPartOfTheModel) {
  bundle_.layers[1].geometry.quantized = false;
  EXPECT_EQ(verdict(), "");
}

TEST_F(BundleMatch, TheKindOfALayersAttentionIsCompared) {
  checkpoint_.config.layers[1].attention.window = 512;
  expect({"layer 1, attention differs", "sliding (the model's)", "full (the bundle's)"});
}

TEST_F(BundleMatch, TheSlidingWindowIsCompared) {
  for (LayerTransforms& layer : bundle_.layers) {
    layer.geometry.attention = AttentionKind::kSliding;
    layer.geometry.sliding_window = 256;
  }
  bundle_.statistics.clear();
  const auto set_window = [&](int window) {
    for (LayerSpec& layer : checkpoint_.config.layers) layer.attention.window = window;
  };
  set_window(512);
  expect({"layer 0, sliding_window differs", "512 (the model's)", "256 (the bundle's)"});
  set_window(256);
  EXPECT_EQ(verdict(), "");
}

TEST_F(BundleMatch, AStatisticsFileIsComparedByItsStatistics) {
  bundle_.layers.clear();
  checkpoint_.config.layers[0].attention.window = 512;
  expect({"layer 0, attention differs"});
}

// What one of the two does not state is not compared, but the file is hashed.
TEST_F(BundleMatch, AnotherConfigFileAloneIsAWarning) {
  std::string config = kConfig;
  config.insert(config.size() - 1, R"(,"rms_norm_eps":1e-5)");
  write_file(folder_.path() / "config.json", config);
  checkpoint_ = open_checkpoint(folder_.path().string());
  expect({"b.h5", "config_sha256", "no key of config.json",
          bundle_.model.config_sha256.substr(0, 12).c_str(),
          checkpoint_.config_sha256.substr(0, 12).c_str()});
  bundle_.model.config_sha256.clear();  // not known
  EXPECT_EQ(verdict(), "");
}

TEST_F(BundleMatch, WithoutSamplesOtherFilesAreRefusedBeforeAnotherConfigIsSaid) {
  bundle_.model.config_sha256 = "other";
  bundle_.model.weights_fingerprint = "other";
  expect({"weights_fingerprint differs"});
}

// A model in memory may be other than its files, whose fingerprint a bundle names.
class SampledMatch : public BundleMatch {
 protected:
  SampledMatch() {
    std::map<std::string, TestTensor> tensors;
    const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
      const int64_t size = shape[0] * (shape.size() > 1 ? shape[1] : 1);
      std::vector<float> values;
      for (int64_t i = 0; i < size; ++i) {
        values.push_back(0.01f * static_cast<float>(i + 1 + 64 * tensors.size()));
      }
      tensors[name] = {std::move(shape), std::move(values)};
    };
    for (const char* layer : {"model.layers.0.self_attn.", "model.layers.1.self_attn."}) {
      const std::string at = layer;
      add(at + "q_proj.weight", {8, 8});
      add(at + "k_proj.weight", {4, 8});
      add(at + "v_proj.weight", {4, 8});
      add(at + "o_proj.weight", {8, 8});
      add(at + "q_norm.weight", {4});
      add(at + "k_norm.weight", {4});
    }
    write_file(folder_.path() / "model.safetensors", safetensors_bytes(tensors));
    checkpoint_ = open_checkpoint(folder_.path().string());
    bundle_.model = describe_model(checkpoint_, false);
    bundle_.weight_samples = sample_weights(checkpoint_.config, *checkpoint_.weights);
  }
};

TEST_F(SampledMatch, AnotherSettingOfTheConfigIsRefused) {
  checkpoint_.config.numerics = {{"rms_norm_eps", 1e-6}};
  bundle_.model.numerics = {{"rms_norm_eps", 9.99999997e-7}, {"num_experts_per_tok", 8}};
  EXPECT_EQ(verdict(), "");  // GGUF has floats; and one of the two does not say the other
  bundle_.model.numerics["rms_norm_eps"] = 1e-5;
  expect({"config.json's rms_norm_eps differs", "1e-05", "1e-06"});
}

TEST_F(SampledMatch, OtherSamplesAreRefusedThoughTheFingerprintIsTheSame) {
  EXPECT_EQ(verdict(), "");
  for (float& entry : bundle_.weight_samples[1].matrices.data) entry *= 2;
  expect({"weight_samples differ", "W_Q of layer 1 differs, and 3 more of 18 tensors",
          "calibrate this model"});
}

TEST_F(SampledMatch, OtherFilesOfTheSameSamplesAreAWarning) {
  bundle_.model.weights_fingerprint = "other";
  expect({"b.h5: the weights of q, k, v and o agree with the bundle's samples, the files are not"});
  bundle_.model.tokenizer_sha256 = "other";
  expect({"tokenizer_sha256 differs"});
  bundle_.model.file_sha256 = "of a GGUF file";  // of whose metadata the other hash is then
  bundle_.model.config_sha256 = "other";
  expect({"written anew or dequantized"});
  EXPECT_EQ(verdict().find("config_sha256"), std::string::npos) << verdict();
  bundle_.weight_samples[1].matrices[0](1, 2) += 1;
  expect({"weight_samples differ", "W_K of layer 1 differs"});
  bundle_.weight_samples.clear();
  expect({"weights_fingerprint differs", "other (the bundle's)"});
}

TEST_F(SampledMatch, ABiasThatTheFilesDoNotHaveIsSeen) {
  bundle_.weight_samples[0].vectors[0](2, 5) = 0.5f;
  expect({"b_V of layer 0 differs, and 0 more of 18 tensors"});
}

TEST_F(SampledMatch, WhatIsNotSampledIsNotCompared) {
  for (WeightSamples& layer : bundle_.weight_samples) layer.vectors[0].row(4).setZero();  // k_norm
  EXPECT_EQ(verdict(), "");
  for (WeightSamples& layer : bundle_.weight_samples) layer.vectors = {};  // of earlier versions
  EXPECT_EQ(verdict(), "");
  bundle_.weight_samples.clear();
  EXPECT_EQ(verdict(), "");
}

TEST_F(SampledMatch, AModelThatRanInFp16MayBeAnUlpAway) {
  float& entry = bundle_.weight_samples[0].matrices[0](0, 0);
  entry *= 1 + 1.0f / 128;  // a bf16 number of at least 0.5 units more
  entry = bf16_to_float(float_to_bf16(entry));
  bundle_.model.engine = "transformers 5.17.0, float16";
  EXPECT_EQ(verdict(), "");
  bundle_.model.engine = "transformers 5.17.0, float32";
  expect({"W_Q of layer 0 differs, and 0 more"});
  bundle_.model.engine = "transformers 5.17.0, float16";
  entry *= 1.1f;
  expect({"W_Q of layer 0 differs, and 0 more"});
}

TEST_F(SampledMatch, ABundleThatNamesNoFilesIsKnownByItsSamples) {
  bundle_.model.weights_fingerprint.clear();
  expect({"b.h5: the bundle names no files of weights"});
  bundle_.model.config_sha256 = "other";
  expect({"names no files of weights", "\nb.h5: the model's configuration"});
  bundle_.weight_samples[0].matrices[0](3, 7) += 1;
  expect({"W_O of layer 0 differs"});
  bundle_.weight_samples.clear();
  expect({"does not say which weights it was calibrated on",
          "weights_fingerprint, or weight_samples"});
}

}  // namespace
