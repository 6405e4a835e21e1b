// The default model through the paged engine on the CPU, beside the block-wise forward.
#include <gtest/gtest.h>

#include "eval/tiny_model.h"
#include "oscar/eval/needle_run.h"

namespace {

using oscar::CacheView;
using oscar::EngineKind;
using oscar_test::TinyModel;

TEST(PagedEngine, LogitsOfTheDefaultModelEqualTheSimulationWithinRounding) {
  const TinyModel tiny;
  oscar::Transformer model(tiny.checkpoint, {});
  const double bound = tiny.checkpoint.config.num_layers / 256.0;
  for (const char* name : {"bundle", "hadamard-clip"}) {
    const auto logits =
        oscar_test::logits_of_engines(model, tiny.method(name, {}, torch::kCPU), tiny.ids(390, 1),
                                      {EngineKind::kSimulate, EngineKind::kReference});
    const auto distance = oscar_test::relative_distance(logits[0], logits[1])[0];
    printf("%s: relative distance of logits, mean %.2e, largest %.2e, bound %.2e\n", name,
           distance.mean().item<double>(), distance.max().item<double>(), bound);
    EXPECT_LE(distance.max().item<double>(), bound) << name;
    // Positions whose windows or pages have just filled: index = length - 1.
    for (const int64_t length : {63, 64, 65, 319, 320, 321, 383, 384, 385}) {
      EXPECT_LE(distance[length - 1].item<double>(), bound) << name << ", length " << length;
    }
    EXPECT_GT(distance[380].item<double>(), 0.0) << "nothing was rounded";
  }
}

TEST(PagedEngine, NeedleAnswersAreThoseOfTheSimulation) {
  const TinyModel tiny;
  oscar::Transformer model(tiny.checkpoint, {});
  std::vector<std::shared_ptr<const oscar::LayerWeights>> weights;
  for (int l = 0; l < model.config().num_layers; ++l) weights.push_back(model.load_layer(l));
  std::vector<int32_t> haystack;
  for (const auto& chunk : tiny.text(1000, 4)) {
    haystack.insert(haystack.end(), chunk.begin(), chunk.end());
  }
  const auto book = oscar::read_needle_book(tiny.checkpoint.folder.parent_path() / "needle");
  const auto prompts = make_needle_prompts(
      book, {.kinds = {"multikey"}, .lengths = {400}, .prompts = 4}, tiny.tokenizer, haystack);
  auto ids = torch::empty({4, 400}, torch::kInt64);
  int64_t longest = 0;
  for (int64_t row = 0; row < 4; ++row) {
    for (int64_t i = 0; i < 400; ++i) ids[row][i] = prompts[row].prompt[i];
    longest = std::max(longest, static_cast<int64_t>(prompts[row].answer.size()));
  }
  for (const auto mode : {oscar::CacheModeKind::kDecode, oscar::CacheModeKind::kPrefill}) {
    const auto method = tiny.method("bundle", {.mode = mode}, torch::kCPU);
    std::vector<torch::Tensor> answers;
    for (const auto kind : {EngineKind::kSimulate, EngineKind::kReference}) {
      const auto engine = make_engine(method, model.config(), {.kind = kind});
      answers.push_back(generate_greedily(model, weights, *engine, ids, longest));
    }
    EXPECT_TRUE(torch::equal(answers[0], answers[1]));
    int passes = 0;
    for (int64_t row = 0; row < 4; ++row) {
      bool right = true;
      for (size_t i = 0; i < prompts[row].answer.size(); ++i) {
        right = right &&
                answers[1][row][static_cast<int64_t>(i)].item<int64_t>() == prompts[row].answer[i];
      }
      passes += right;
    }
    EXPECT_GE(passes, 3) << "the text compared says nothing of the needles";
  }
}

}  // namespace
