// Weights of layers in turn: what is kept, and what they are.
#include "oscar/executor/layer_loader.h"

#include <gtest/gtest.h>

#include <limits>

#include "model/small_model.h"
#include "oscar/base/error.h"
#include "oscar/model/layer_weights.h"

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
