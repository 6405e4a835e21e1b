// Rotation tensors in GGUF files: back as they were, refused where they are none.
#include "oscar/bundle/rotation_files.h"

#include <gtest/gtest.h>
#include <cmath>
#include <cstring>

#include "bundle/plain_bundle.h"
#include "bundle/rotated_bundle.h"
#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/bundle/import.h"
#include "oscar/io/gguf.h"

namespace oscar {
namespace {

struct GgufRotations : testing::Test {
  oscar_test::TemporaryFolder folder;
  std::filesystem::path path = folder.path() / "x.gguf";
};

TEST_F(GgufRotations, ComeBackAsTheyWereAndStandTransposedInTheFile) {
  const Bundle bundle = plain::rotated_bundle(true);
  const TransformSet set = transform_set({&bundle.layers[0], &bundle.layers[1]}, true);
  write_gguf_rotations(path, set);
  const ReadTransforms read = read_transforms({path}, 2);
  ASSERT_EQ(read.set.size(), 2u);
  for (const auto& [id, layer] : set) {
    EXPECT_EQ(read.set.at(id).key.forward, layer.key.forward);
    EXPECT_EQ(read.set.at(id).value.forward, layer.value.forward);
  }
  const GgufFile file(path);
  EXPECT_EQ(file.text("general.architecture"), "qwen3");
  float second = 0;
  std::memcpy(&second, file.tensors().at("blk.1.attn_k_rot.weight").data + sizeof(float),
              sizeof second);
  EXPECT_EQ(second, set.at(1).key.forward[0](1, 0));
}

TEST_F(GgufRotations, AreRefusedWhereTheyAreNone) {
  const FloatTensor square = {{2, 2}, {1, 2, 3, 4}}, wide = {{1, 2}, {1, 2}};
  const FloatTensor infinite = {{1, 1}, {INFINITY}};
  for (const FloatTensors& tensors :
       {FloatTensors{{"token_embd.weight", square}},
        FloatTensors{{"blk.0.attn_k_rot.weight", wide}},
        FloatTensors{{"blk.0.attn_k_rot.weight", infinite}},
        FloatTensors{{"blk.x.attn_k_rot.weight", square}},
        FloatTensors{{"blk.-1.attn_k_rot.weight", square}},
        FloatTensors{{"blk.99999.attn_k_rot.weight", square}},
        FloatTensors{{"blk.0.attn_k_rot.weight", square}}}) {  // no values
    write_gguf(path, {{"general.architecture", std::string("qwen3")}}, tensors);
    EXPECT_THROW(read_transforms({path}, 1), Error) << tensors.begin()->first;
  }
}

}  // namespace
}  // namespace oscar
