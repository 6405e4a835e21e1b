#include "oscar/model/layer_major.h"

#include <gtest/gtest.h>
#include <limits>

#include "model/small_model.h"
#include "oscar/base/error.h"
#include "oscar/model/layer_weights.h"

// One process does all pieces, and takes each as soon as it is done. Several processes are tested
// in tests/cli/test_several_processes_eval.py.

namespace {

using namespace oscar;

TEST(WorkInTurn, OneProcessTakesWhatItHasDoneInOrder) {
  Ranks one;
  std::vector<size_t> taken;
  work_in_turn(
      one, 2, 5,
      [&](const std::vector<size_t>& pieces, const PieceDone& done) {
        EXPECT_EQ(pieces, (std::vector<size_t>{2, 3, 4}));
        for (const size_t piece : pieces) {
          done(piece, {static_cast<uint8_t>(piece)});
          EXPECT_EQ(taken.back(), piece);
        }
      },
      [&](size_t piece, const std::vector<uint8_t>& result, bool own) {
        EXPECT_EQ(result, std::vector<uint8_t>{static_cast<uint8_t>(piece)});
        EXPECT_TRUE(own);
        taken.push_back(piece);
      });
  EXPECT_EQ(taken, (std::vector<size_t>{2, 3, 4}));
  EXPECT_EQ(longest_part(one, torch::kCPU, 3), 1.0);
  EXPECT_EQ(longest_part(one, torch::kCPU, 0), 0.0);
}

}  // namespace

// Weights of layers in turn: what is kept, and what they are.

namespace oscar_test {
namespace {

using namespace oscar;

TEST(LayerLoader, GivesTheWeightsOfTheLayerThatIsAskedFor) {
  const Model model(make_tensors());
  for (const bool resident : {false, true}) {
    LayerLoader loader(*model.transformer, resident);
    for (const int layer : {0, 1, 0, 0, 1}) {
      const LayerWeights& found = loader.get(layer);
      const auto wanted = model.transformer->load_layer(layer);
      EXPECT_TRUE(torch::equal(found.qkv, wanted->qkv));
      EXPECT_TRUE(torch::equal(found.gate_up, wanted->gate_up));
      EXPECT_TRUE(torch::equal(found.down, wanted->down));
    }
  }
}

TEST(LayerLoader, ReadsAResidentLayerOnceAndLetsGoOfOthers) {
  const Model model(make_tensors());
  LayerLoader resident(*model.transformer, true), streaming(*model.transformer, false);
  const torch::Tensor kept = resident.get(0).qkv, streamed = streaming.get(0).qkv;
  EXPECT_EQ(streaming.get(0).qkv.data_ptr(), streamed.data_ptr());
  resident.get(1);
  streaming.get(1);
  EXPECT_EQ(resident.get(0).qkv.data_ptr(), kept.data_ptr());
  EXPECT_EQ(streamed.use_count(), 1);  // this one
}

TEST(LayerLoader, PassesOnWhatReadingThrows) {
  Tensors tensors = make_tensors();
  tensors.at("model.layers.1.mlp.down_proj.weight").values[5] =
      std::numeric_limits<float>::quiet_NaN();
  const Model model(tensors);
  LayerLoader loader(*model.transformer, true);
  loader.get(0);
  EXPECT_THROW(loader.get(1), Error);
}

}  // namespace
}  // namespace oscar_test
