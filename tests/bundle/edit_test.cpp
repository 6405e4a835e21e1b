#include "oscar/bundle/edit.h"

#include <gtest/gtest.h>
#include <functional>

#include "bundle/sample.h"
#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/bundle/schema.h"
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

// "" where the two are added.
std::string merge_refusal(const Bundle& a, const Bundle& b) {
  try {
    merge_statistics({a, b}, {"a.h5", "b.h5"}, true);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST(Merge, TheSameSumsAreRefusedThoughNothingNamesTheirText) {
  Bundle a = sample::statistics_bundle();
  a.corpus.tokens_sha256.clear();
  for (CorpusSource& source : a.corpus.sources) source.sha256.clear();
  EXPECT_FALSE(names_its_text(a));
  Bundle b = a;
  const auto refusal = [&] {
    try {
      merge_statistics({a, b}, {"a.h5", "b.h5"}, false);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  for (const char* word : {"counted twice", "b.h5", "in a.h5", "--allow-repeats"}) {
    EXPECT_NE(refusal().find(word), std::string::npos) << refusal();
  }
  b.statistics[0].k_moment[0](0, 0) += 1;
  EXPECT_EQ(refusal(), "");
}

TEST(Merge, SumsOfOtherWeightsAreRefused) {
  Bundle a = sample::statistics_bundle(), b = a;
  b.weight_samples[1].matrices[1](2, 3) += 1;
  const auto refusal = [&] { return merge_refusal(a, b); };
  for (const char* word : {"different weights", "b.h5: weight_samples", "those of a.h5",
                           "W_V of layer 1 differs, and 0 more of 18 tensors"}) {
    EXPECT_NE(refusal().find(word), std::string::npos) << refusal();
  }
  a.weight_samples.clear();  // not known
  EXPECT_EQ(refusal(), "");
  EXPECT_TRUE(have_comparable_weights(a, b));
  b.model.weights_fingerprint.clear();
  EXPECT_FALSE(have_comparable_weights(a, b));
}

TEST(Merge, SumsOfAnotherConfigAreRefusedWhereBothAreKnown) {
  Bundle a = sample::statistics_bundle(), b = a;
  b.corpus.tokens_sha256 = "other";
  b.corpus.sources[0].sha256 = "other";
  const auto refusal = [&] { return merge_refusal(a, b); };
  a.model.numerics = {{"rms_norm_eps", 1e-6}};
  b.model.numerics = nullptr;  // of an earlier version
  EXPECT_EQ(refusal(), "");
  b.model.numerics = {{"rms_norm_eps", 1e-5}};
  EXPECT_NE(refusal().find("attribute numerics"), std::string::npos) << refusal();
}

// With a gate, M_O is a mean over the text.

TEST(Merge, AMetricThatDependsOnTheTextIsWeighedByTokens) {
  Bundle a = sample::statistics_bundle(), b = a;
  b.corpus.tokens_sha256 = "other";
  b.corpus.sources[0].sha256 = "other";
  const auto tokens = a.statistics[0].count_kv;
  b.statistics[0].count_kv = 3 * tokens;
  for (double& entry : b.statistics[0].o_proj_metric.data) entry *= 5;
  const Bundle both = merge_statistics({a, b}, {"a.h5", "b.h5"}, true);
  for (size_t i = 0; i < both.statistics[0].o_proj_metric.data.size(); ++i) {
    EXPECT_DOUBLE_EQ(both.statistics[0].o_proj_metric.data[i],
                     4 * a.statistics[0].o_proj_metric.data[i]);
  }
  EXPECT_EQ(both.statistics[1].o_proj_metric, a.statistics[1].o_proj_metric);
}

TEST(Merge, PositionsAreThoseThatAllInputsWereFittedFor) {
  Bundle a = sample::statistics_bundle(), b = a;
  b.corpus.tokens_sha256 = "other";
  b.corpus.sources[0].sha256 = "other";
  a.position_span = b.position_span = 4096;
  EXPECT_EQ(merge_statistics({a, b}, {"a.h5", "b.h5"}, true).position_span, 4096);
  b.position_span = 131072;
  EXPECT_EQ(merge_statistics({a, b}, {"a.h5", "b.h5"}, true).position_span, 0);
  EXPECT_EQ(merge_statistics({b, a}, {"b.h5", "a.h5"}, true).position_span, 0);
}

// The fingerprint of a bundle's text: kept, dropped, merged, and refused when it can't be ours.

namespace {

using namespace oscar;
using sample::BundleTest;

class Fingerprint : public BundleTest {
 protected:
  // Writes the sample with `hashes` changed by `change` in the file alone, and reads it back.
  std::string reading_of(const std::function<void(EncodedFile&)>& change) {
    Bundle bundle = sample::statistics_bundle();
    bundle.fingerprint.hashes = {3, 5, 8};
    EncodedFile encoded = encode_bundle(bundle, nullptr);
    change(encoded);
    AtomicFile out(file("changed.h5"));
    write_encoded(std::move(encoded), out);
    out.commit();
    try {
      const Bundle back = read_bundle(file("changed.h5"));
      return back.fingerprint.empty() ? "unknown" : "read";
    } catch (const Error& error) {
      return error.what();
    }
  }

  static hdf5::DatasetView& dataset(EncodedFile& file) {
    for (auto& d : file.datasets) {
      if (d.path == schema::kFingerprint) return d;
    }
    throw std::logic_error("no fingerprint");
  }
};

TEST_F(Fingerprint, ComesBackExactlyWithTheRecordOfConvergence) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.fingerprint.hashes = {0, 7, INT64_MAX};
  bundle.convergence = Json{{"tokens", 100}, {"problem", "one batch"}};
  write_bundle(bundle, file("a.h5"), false);
  const Bundle back = read_bundle(file("a.h5"));
  EXPECT_EQ(back.fingerprint, bundle.fingerprint);
  EXPECT_EQ(back.convergence, bundle.convergence);
}

TEST_F(Fingerprint, AbsentIsUnknown) {
  write_bundle(sample::statistics_bundle(), file("a.h5"), false);
  const Bundle back = read_bundle(file("a.h5"));
  EXPECT_TRUE(back.fingerprint.empty());
  EXPECT_TRUE(back.convergence.is_null());
}

TEST_F(Fingerprint, OfAnotherRuleIsUnknown) {
  for (const char* name : {"rule", "ngram", "capacity"}) {
    EXPECT_EQ(reading_of([name](EncodedFile& file) {
                for (auto& attribute : file.attributes) {
                  if (attribute.object == schema::kFingerprint && attribute.name == name) {
                    attribute.value = std::string("another");
                  }
                }
              }),
              "unknown")
        << name;
  }
}

TEST_F(Fingerprint, ThatThisRuleCannotHaveMadeIsRefused) {
  static const std::vector<int64_t> kNegative = {-1, 2}, kRepeated = {2, 2}, kDescending = {3, 2};
  static const std::vector<int64_t> kMany(static_cast<size_t>(kFingerprintCapacity) + 1, 1);
  static const std::vector<double> kFloats = {1, 2};
  const auto with = [this](const std::vector<int64_t>& hashes, hdf5::Shape shape) {
    return reading_of([&](EncodedFile& file) {
      dataset(file).data = hashes.data();
      dataset(file).shape = std::move(shape);
    });
  };
  EXPECT_EQ(with({2, 4, 6}, {3}), "read");
  for (const auto* hashes : {&kNegative, &kRepeated, &kDescending}) {
    EXPECT_NE(with(*hashes, {2}).find("ascending order"), std::string::npos);
  }
  EXPECT_NE(with(kMany, {kMany.size()}).find("at most [8192]"), std::string::npos);
  EXPECT_NE(with({2, 4}, {2, 1}).find("wrong shape"), std::string::npos);
  const std::string floats = reading_of([](EncodedFile& file) {
    dataset(file) = {schema::kFingerprint, hdf5::Dtype::kF64, {2}, kFloats.data(), false};
  });
  EXPECT_NE(floats.find("wrong dtype"), std::string::npos) << floats;
}

TEST_F(Fingerprint, IsDroppedWithTheStatistics) {
  Bundle bundle = sample::rotation_bundle(TransformKind::kOscar);
  bundle.fingerprint.hashes = {1};
  EXPECT_TRUE(strip_bundle(std::move(bundle), StripProfile::kPublish, "a.h5").fingerprint.empty());
}

TEST_F(Fingerprint, OfMergedFilesIsThatOfBothOrUnknown) {
  Bundle a = sample::statistics_bundle(), b = sample::statistics_bundle();
  a.convergence = Json{{"tokens", 100}};
  a.fingerprint.hashes = {1, 4};
  b.fingerprint.hashes = {2, 4};
  const Bundle both = merge_statistics({a, b}, {"a.h5", "b.h5"}, true);
  EXPECT_EQ(both.fingerprint.hashes, (std::vector<int64_t>{1, 2, 4}));
  EXPECT_TRUE(both.convergence.is_null());
  b.fingerprint = {};
  EXPECT_TRUE(merge_statistics({a, b}, {"a.h5", "b.h5"}, true).fingerprint.empty());
  EXPECT_TRUE(merge_statistics({b, a, a}, {"b.h5", "a.h5", "c.h5"}, true).fingerprint.empty());
}

TEST_F(Fingerprint, ARecordOfManyLayersLosesItsTableButNotItsVerdict) {
  Bundle bundle = sample::statistics_bundle();
  bundle.convergence = Json{{"cost", 0.25}, {"layers", std::vector<double>(20000, 0.125)}};
  write_bundle(bundle, file("a.h5"), false);
  EXPECT_EQ(read_bundle(file("a.h5")).convergence, (Json{{"cost", 0.25}}));
}

}  // namespace
