// FP8 folders: codes and scales as they are stored, and everything that does not fit refused.
#include "oscar/model/checkpoint/weights.h"

#include <gtest/gtest.h>
#include <cmath>
#include <functional>
#include <random>

#include "model/checkpoint/fp8_folder.h"
#include "oscar/base/error.h"
#include "oscar/model/checkpoint/named_weights.h"

namespace {

using namespace oscar;
using namespace oscar_test;

const std::string kWeight = "model.layers.0.mlp.up_proj.weight";
const std::string kOther = "model.norm.weight";

class Fp8Folder : public ::testing::Test {
 protected:
  Fp8Weights open(const RawTensors& tensors, const Json& quantization) {
    write_file(folder_.path() / "model.safetensors", safetensors_bytes(tensors));
    return {std::make_shared<SafetensorsWeights>(folder_.path()),
            *parse_quantization({{"quantization_config", quantization}}, "config.json")};
  }

  void expect_refused(const RawTensors& tensors, const Json& quantization,
                      const std::vector<std::string>& words) {
    try {
      const Fp8Weights weights = open(tensors, quantization);
      for (const std::string& name : weights.names()) {
        weights.get(name, tensors.at(name).shape);
      }
      ADD_FAILURE() << words[0] << " was accepted";
    } catch (const Error& error) {
      for (const std::string& word : words) {
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
            << word << " is not in: " << error.what();
      }
    }
  }

  TemporaryFolder folder_;
};

// Blocks of 4 x 2 over 6 x 5: the last ones of both directions are partial.
RawTensors in_blocks() {
  return {{kWeight, codes(6, 5)},
          {kWeight + "_scale_inv", f32({2, 3}, {1, 2, 3, 4, 5, 6})},
          {kOther, bf16({2}, {1, 2})}};
}
const Json kBlocks = fp8_config({4, 2});

RawTensors by_channel() {
  return {{kWeight, codes(3, 5)}, {kWeight + "_scale", bf16({3, 1}, {1, 0.5, 3})}};
}

TEST_F(Fp8Folder, BlocksComeWithTheirScalesAndTheScalesHaveNoNameOfTheirOwn) {
  const Fp8Weights weights = open(in_blocks(), kBlocks);
  EXPECT_EQ(weights.names(), (std::vector<std::string>{kWeight, kOther}));
  EXPECT_TRUE(weights.contains(kWeight));
  EXPECT_FALSE(weights.contains(kWeight + "_scale_inv"));
  const TensorView view = weights.get(kWeight, {6, 5});
  ASSERT_NE(view.fp8, nullptr);
  EXPECT_EQ(std::memcmp(view.data, codes(6, 5).bytes.data(), 30), 0);
  EXPECT_EQ(view.bytes, 30u);
  EXPECT_EQ(view.fp8->scales, (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(view.fp8->block_rows, 4);
  EXPECT_EQ(view.fp8->block_columns, 2);
  EXPECT_EQ(weights.get(kOther, {2}).fp8, nullptr);
  EXPECT_EQ(weights.quantization(), "F8_E4M3 with a scale for every 4 x 2 (1 tensors), BF16 (1)");
}

TEST_F(Fp8Folder, ChannelsMayBeAColumnOrAVectorInEitherPrecision) {
  RawTensors tensors = by_channel();
  const RawTensor half = {"F16", {3, 1}, std::string("\x00\x3c\x00\x38\x00\x42", 6)};
  for (const RawTensor& scales : {bf16({3, 1}, {1, 0.5, 3}), f32({3}, {1, 0.5, 3}), half}) {
    tensors[kWeight + "_scale"] = scales;
    const TensorView view = open(tensors, compressed_config("channel")).get(kWeight, {3, 5});
    EXPECT_EQ(view.fp8->scales, (std::vector<float>{1, 0.5, 3}));
    EXPECT_EQ(view.fp8->block_rows, 1);
    EXPECT_EQ(view.fp8->block_columns, 5);
  }
}

TEST_F(Fp8Folder, OneScaleMayBeANumberAVectorOrAMatrixUnderBothNames) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {1}, {1, 1}}) {
    for (const char* suffix : {"_scale", "_scale_inv"}) {
      const RawTensors tensors = {{kWeight, codes(3, 5)},
                                  {kWeight + suffix, f32(shape, {0.25})},
                                  {"model.layers.0.mlp.up_proj.input_scale", f32({}, {2})},
                                  {"model.layers.0.self_attn.k_proj.k_scale", f32({}, {2})}};
      const Fp8Weights weights = open(tensors, fp8_config());
      const TensorView view = weights.get(kWeight, {3, 5});
      EXPECT_EQ(view.fp8->scales, std::vector<float>{0.25});
      EXPECT_EQ(view.fp8->block_rows, 3);
      EXPECT_EQ(view.fp8->block_columns, 5);
      EXPECT_EQ(weights.names(), std::vector<std::string>{kWeight});
      EXPECT_EQ(weights.quantization(),
                "F8_E4M3 with a scale a tensor (1 tensors); 2 scales of activations or of the "
                "cache not used");
    }
  }
}

TEST_F(Fp8Folder, ScalesOfTheCacheBesidePlainWeightsAreTakenAway) {
  const RawTensors tensors = {{kOther, bf16({2}, {1, 2})},
                              {"model.layers.0.self_attn.k_scale", f32({1}, {2})},
                              {"model.layers.0.self_attn.v_scale", f32({1}, {2})}};
  write_file(folder_.path() / "model.safetensors", safetensors_bytes(tensors));
  const auto files = std::make_shared<SafetensorsWeights>(folder_.path());
  EXPECT_TRUE(has_other_scales(*files));
  const Fp8Weights weights(files, {.layout = ScaleLayout::kNone});
  EXPECT_EQ(weights.names(), std::vector<std::string>{kOther});
  EXPECT_EQ(weights.get(kOther, {2}).fp8, nullptr);
  EXPECT_EQ(weights.quantization(), "");  // the weights are plain ones
  EXPECT_EQ(weights.unused_scales(), "2 scales of activations or of the cache not used");
  write_file(folder_.path() / "model.safetensors", safetensors_bytes(in_blocks()));
  EXPECT_FALSE(has_other_scales(SafetensorsWeights(folder_.path())));
}

TEST_F(Fp8Folder, TheFingerprintKnowsCodesAndScales) {
  RawTensors tensors = in_blocks();
  const std::string before = open(tensors, kBlocks).fingerprint(false);
  tensors[kWeight + "_scale_inv"] = f32({2, 3}, {1, 2, 3, 4, 5, 7});
  EXPECT_NE(open(tensors, kBlocks).fingerprint(false), before);
  tensors = in_blocks();
  tensors[kWeight].bytes[7] ^= 1;
  EXPECT_NE(open(tensors, kBlocks).fingerprint(false), before);
}

TEST_F(Fp8Folder, ScalesThatAreNoPositiveNumberAreRefusedByName) {
  for (const float wrong : {0.0f, -0.0f, -1.0f, INFINITY, -INFINITY, NAN}) {
    RawTensors tensors = in_blocks();
    tensors[kWeight + "_scale_inv"] = f32({2, 3}, {1, 2, 3, 4, wrong, 6});
    expect_refused(tensors, kBlocks, {"no positive number", kWeight + "_scale_inv", "number 4"});
    tensors = by_channel();
    tensors[kWeight + "_scale"] = bf16({3, 1}, {1, wrong, 3});
    expect_refused(tensors, compressed_config("channel"),
                   {"no positive number", kWeight + "_scale", "number 1"});
  }
}

TEST_F(Fp8Folder, ScalesOfAnotherShapeOrTypeAreRefusedByName) {
  const std::vector<int64_t> wrong[] = {{3, 2}, {2, 2}, {1, 3}, {6}, {2, 3, 1}, {}, {2, 4}};
  for (const std::vector<int64_t>& shape : wrong) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    RawTensors tensors = in_blocks();
    tensors[kWeight + "_scale_inv"] =
        f32(shape, std::vector<float>(static_cast<size_t>(count), 1.0f));
    expect_refused(tensors, kBlocks, {"does not fit", kWeight + "_scale_inv", "[2, 3]"});
  }
  RawTensors tensors = by_channel();
  tensors[kWeight + "_scale"] = f32({1, 3}, {1, 1, 1});
  expect_refused(tensors, compressed_config("channel"), {"does not fit", "[3, 1]"});
  tensors[kWeight + "_scale"] = f32({}, {1});
  expect_refused(tensors, compressed_config("channel"), {"does not fit", "[3, 1]"});
  tensors[kWeight + "_scale"] = f32({3}, {1, 1, 1});
  expect_refused(tensors, compressed_config("tensor"), {"does not fit", "[1, 1]"});
  tensors = in_blocks();
  tensors[kWeight + "_scale_inv"] = {"F8_E8M0", {2, 3}, "abcdef"};
  expect_refused(tensors, kBlocks, {"dtype", "F8_E8M0"});
}

TEST_F(Fp8Folder, WeightsAndScalesWithoutEachOtherAreRefusedByName) {
  RawTensors tensors = in_blocks();
  tensors.erase(kWeight + "_scale_inv");
  expect_refused(tensors, kBlocks, {"has no scales", kWeight + "_scale_inv"});
  tensors = in_blocks();
  tensors[kWeight + "_scale"] = f32({2, 3}, {1, 2, 3, 4, 5, 6});
  expect_refused(tensors, kBlocks, {"two names", kWeight});
  for (const char* name : {"model.norm.weight_scale", "model.norm.weight_scale_inv", "a_scale"}) {
    tensors = in_blocks();
    tensors[name] = f32({1}, {1});
    expect_refused(tensors, kBlocks, {"belong to no tensor", name});
  }
  // The other method's name does not count.
  tensors = {{kWeight, codes(3, 5)}, {kWeight + "_scale_inv", f32({3, 1}, {1, 1, 1})}};
  expect_refused(tensors, compressed_config("channel"), {"has no scales"});
  expect_refused({{kOther, bf16({2}, {1, 2})}}, kBlocks, {"no tensor is stored in FP8"});
}

TEST_F(Fp8Folder, TensorsThatContradictTheConfigurationAreRefused) {
  Json config = kBlocks;
  config["modules_to_not_convert"] = {"lm_head", "model.layers.0.mlp.up_proj"};
  expect_refused(in_blocks(), config, {"leaves out", kWeight});
  RawTensors tensors = in_blocks();
  tensors[kWeight] = {"F8_E4M3", {30}, codes(6, 5).bytes};
  expect_refused(tensors, kBlocks, {"no matrix", kWeight});
  tensors[kWeight] = {"F8_E4M3", {0, 5}, ""};
  expect_refused(tensors, kBlocks, {"no matrix", kWeight});
  tensors = in_blocks();
  tensors["model.other.weight"] = {"F8_E5M2", {2}, "ab"};
  expect_refused(tensors, kBlocks, {"dtype", "F8_E5M2"});
  EXPECT_THROW(open(in_blocks(), kBlocks).get(kWeight, {5, 6}), Error);
  EXPECT_THROW(open(in_blocks(), kBlocks).get("missing", {1}), Error);
}

TEST_F(Fp8Folder, SurvivesRandomChanges) {
  const std::string whole = safetensors_bytes(in_blocks());
  std::mt19937_64 random(7);
  int refused = 0, rounds = 1500;
  for (int round = 0; round < rounds; ++round) {
    std::string changed = whole;
    for (uint64_t edits = 1 + random() % 4; edits > 0; --edits) {
      const size_t place = random() % changed.size();
      if (random() % 3 == 0) {
        changed.erase(place, 1 + random() % 16);
      } else {
        changed[place] = static_cast<char>(random());
      }
    }
    write_file(folder_.path() / "model.safetensors", changed);
    try {
      const Fp8Weights weights(std::make_shared<SafetensorsWeights>(folder_.path()),
                               *parse_quantization({{"quantization_config", kBlocks}}, ""));
      weights.get(kOther, {2});
      const TensorView view = weights.get(kWeight, {6, 5});
      ASSERT_NE(view.fp8, nullptr);
      ASSERT_EQ(view.fp8->scales.size(), 6u);
      for (const float scale : view.fp8->scales) ASSERT_TRUE(std::isfinite(scale) && scale > 0);
      unsigned sum = 0;
      for (size_t i = 0; i < 30; ++i) sum += static_cast<unsigned char>(view.data[i]);
      ASSERT_LE(sum, 30u * 255u);
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, rounds / 2);
  EXPECT_LT(refused, rounds);  // changes of codes alone are another checkpoint, no damage
}

}  // namespace

// Tensors that hold several matrices, under the names of the table.

namespace {

using namespace oscar;
using namespace oscar_test;

// Phi-3 of one layer: 2 query heads and 1 KV head of 4 dimensions, a width of 8.
const Json kPhi = {{"model_type", "phi3"},     {"architectures", {"Phi3ForCausalLM"}},
                   {"hidden_size", 8},         {"intermediate_size", 6},
                   {"num_hidden_layers", 1},   {"num_attention_heads", 2},
                   {"num_key_value_heads", 1}, {"vocab_size", 4}};
const std::string kAttention = "model.layers.0.self_attn.", kMlp = "model.layers.0.mlp.";

constexpr NamePart kTwoNames[] = {{"b.", "a."}};

struct JoinedFolder {
  TemporaryFolder folder;
  ModelConfig config = parse_model_config(kPhi, "config.json");

  std::shared_ptr<const WeightSource> open(const RawTensors& tensors, const Json& quantization) {
    write_file(folder.path() / "model.safetensors", safetensors_bytes(tensors));
    const auto files = std::make_shared<const SafetensorsWeights>(folder.path());
    const auto layout = parse_quantization({{"quantization_config", quantization}}, "config.json");
    return by_table_names(files, std::make_shared<Fp8Weights>(files, *layout), config);
  }
};

RawTensors joined() {
  return {{kAttention + "qkv_proj.weight", codes(16, 8)},
          {kMlp + "gate_up_proj.weight", codes(12, 8)}};
}

TEST(JoinedTensors, RowsInFp8BringTheScalesOfTheirBlocks) {
  JoinedFolder folder;
  RawTensors tensors = joined();
  // Blocks of 4 x 8: q has two, k and v one each; gate and up end within one.
  tensors[kAttention + "qkv_proj.weight_scale_inv"] = f32({4, 1}, {1, 2, 3, 4});
  tensors[kMlp + "gate_up_proj.weight_scale_inv"] = f32({3, 1}, {5, 6, 7});
  const auto weights = folder.open(tensors, fp8_config({4, 8}));
  const TensorView q = weights->get(kAttention + "q_proj.weight", {8, 8});
  const TensorView v = weights->get(kAttention + "v_proj.weight", {4, 8});
  EXPECT_EQ(q.fp8->scales, (std::vector<float>{1, 2}));
  EXPECT_EQ(v.fp8->scales, (std::vector<float>{4}));
  EXPECT_EQ(std::memcmp(v.data, codes(16, 8).bytes.data() + 12 * 8, 4 * 8), 0);
  EXPECT_EQ(weights->stored_bytes(kAttention + "k_proj.weight").bytes, 32u);
  EXPECT_EQ(weights->get(kMlp + "gate_proj.weight", {6, 8}).fp8->scales,
            (std::vector<float>{5, 6}));
  try {
    weights->get(kMlp + "up_proj.weight", {6, 8});
    ADD_FAILURE() << "half a block was read";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("two matrices"), std::string::npos);
  }
}

TEST(JoinedTensors, OneScaleATensorAndOnesOfChannelsAreThoseOfEveryMatrix) {
  JoinedFolder folder;
  RawTensors tensors = joined();
  tensors[kAttention + "qkv_proj.weight_scale"] = f32({}, {3});
  tensors[kMlp + "gate_up_proj.weight_scale"] = f32({}, {2});
  const TensorView k =
      folder.open(tensors, fp8_config())->get(kAttention + "k_proj.weight", {4, 8});
  EXPECT_EQ(k.fp8->scales, (std::vector<float>{3}));
  EXPECT_EQ(k.fp8->block_rows, 4);
  std::vector<float> rows(16);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i + 1);
  tensors[kAttention + "qkv_proj.weight_scale"] = f32({16, 1}, rows);
  tensors[kMlp + "gate_up_proj.weight_scale"] = f32({12, 1}, {rows.begin(), rows.begin() + 12});
  const auto weights = folder.open(tensors, compressed_config("channel"));
  EXPECT_EQ(weights->get(kMlp + "up_proj.weight", {6, 8}).fp8->scales,
            (std::vector<float>{7, 8, 9, 10, 11, 12}));
}

TEST(JoinedTensors, OfAnotherShapeOrStoredTwiceAreRefused) {
  JoinedFolder folder;
  const auto refusal = [&](const RawTensors& tensors) {
    write_file(folder.folder.path() / "model.safetensors", safetensors_bytes(tensors));
    const auto files = std::make_shared<const SafetensorsWeights>(folder.folder.path());
    try {
      by_table_names(files, files, folder.config);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const std::vector<float> numbers(128);
  const RawTensors short_one = {
      {kAttention + "qkv_proj.weight", f32({15, 8}, {numbers.begin(), numbers.begin() + 120})}};
  EXPECT_NE(refusal(short_one).find("qkv_proj"), std::string::npos) << refusal(short_one);
  folder.config.stored_names.parts = std::span(kTwoNames);
  const RawTensors twice = {{"a.weight", f32({1}, {1})}, {"b.weight", f32({1}, {1})}};
  EXPECT_NE(refusal(twice).find("two tensors"), std::string::npos) << refusal(twice);
}

}  // namespace
