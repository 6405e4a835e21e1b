// The default model through the paged engine on the CPU, beside the block-wise forward.
#include <gtest/gtest.h>

#include "eval/tiny_model.h"
#include "oscar/eval/needles.h"

namespace {

using oscar::CacheView;
using oscar::EngineKind;
using oscar_test::TinyModel;

TEST(PagedEngine, LogitsOfTheDefaultModelEqualTheSimulationWithinRounding) {
  const TinyModel tiny;
  oscar::Transformer model(tiny.checkpoint, {});
  for (const char* name : {"bundle", "hadamard-clip"}) {
    const CacheView view;
    const auto logits =
        oscar_test::logits_of_engines(model, tiny.method(name, view, torch::kCPU), tiny.ids(390, 1),
                                      {EngineKind::kSimulate, EngineKind::kReference});
    oscar_test::expect_agreement(logits[0], logits[1], logits[2], view.sink + view.recent,
                                 tiny.checkpoint.config.num_layers, name);
  }
}

TEST(PagedEngine, NeedleAnswersAreThoseOfTheSimulation) {
  const TinyModel tiny;
  oscar::Transformer model(tiny.checkpoint, {});
  std::vector<std::shared_ptr<const oscar::LayerWeights>> weights;
  for (int l = 0; l < model.config().num_layers; ++l) weights.push_back(model.load_layer(l));
  std::vector<int32_t> haystack;
  for (const auto& sequence : tiny.text(1000, 4)) {
    haystack.insert(haystack.end(), sequence.begin(), sequence.end());
  }
  const auto book = oscar::read_needle_book(tiny.checkpoint.folder.parent_path() / "needle");
  const auto prompts =
      oscar::make_needle_prompts(book, {.kinds = {"multikey"}, .lengths = {400}, .prompts = 4},
                                 {.tokenizer = &tiny.tokenizer, .haystack = &haystack});
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
      const auto engine = oscar::make_engine(method, model.config(), {.kind = kind});
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
