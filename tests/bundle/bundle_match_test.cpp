// A bundle is matched with its model field by field, as far as it stores them.
#include "oscar/bundle/bundle_match.h"

#include <gtest/gtest.h>

#include "checkpoint/model_folder.h"
#include "oscar/base/error.h"

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

// The epsilon of norms is in no tensor and in no attribute, but in the file that is hashed.
TEST_F(BundleMatch, AnotherConfigFileAloneIsAWarning) {
  std::string config = kConfig;
  config.insert(config.size() - 1, R"(,"rms_norm_eps":1e-5)");
  write_file(folder_.path() / "config.json", config);
  checkpoint_ = open_checkpoint(folder_.path().string());
  expect({"b.h5", "config_sha256", "rms_norm_eps",
          bundle_.model.config_sha256.substr(0, 12).c_str(),
          checkpoint_.config_sha256.substr(0, 12).c_str()});
  bundle_.model.config_sha256.clear();  // not known
  EXPECT_EQ(verdict(), "");
}

TEST_F(BundleMatch, OtherWeightsAreRefusedBeforeAnotherConfigIsSaid) {
  bundle_.model.config_sha256 = "other";
  bundle_.model.weights_fingerprint = "other";
  expect({"weights_fingerprint differs"});
}

}  // namespace
