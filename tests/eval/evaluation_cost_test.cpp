// What an evaluation leaves for hidden states, and that figures do not depend on it.
#include "oscar/eval/evaluation_cost.h"

#include <gtest/gtest.h>

#include "model/small_model.h"
#include "oscar/base/error.h"
#include "oscar/eval/session.h"

namespace {

using namespace oscar;
using namespace oscar_test;

constexpr EvaluationSize kSize{.batch_tokens = 64, .longest_sequence = 32, .methods = 3};
constexpr int64_t kOneBatch = 64 * 24 * 4 * 3;  // tokens, hidden size, float32, methods

// All but hidden states.
int64_t fixed_bytes(const Transformer& model, const EvaluationSize& size) {
  return memory_peak(evaluation_needs(model, size), {}, 0, torch::kCPU).host_bytes;
}

TEST(HiddenStateRoom, IsHalfOfWhatIsLeftAndOneBatchAtLeast) {
  const Model model(make_tensors());
  const int64_t fixed = fixed_bytes(*model.transformer, kSize);
  const auto room = [&](int64_t left) {
    return plan_hidden_room(evaluation_needs(*model.transformer, kSize),
                            {.host_bytes = fixed + left}, torch::kCPU);
  };
  EXPECT_EQ(room(10 * kOneBatch), 5 * kOneBatch);
  EXPECT_EQ(room(kOneBatch), kOneBatch);
  try {
    room(kOneBatch - 1);
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("--host-memory"), std::string::npos) << text;
    EXPECT_NE(text.find("for libtorch"), std::string::npos) << "the largest need: " << text;
  }
}

TEST(HiddenStateRoom, CountsEveryLayerWhereAnswersAreGenerated) {
  const Model model(make_tensors());
  EvaluationSize generating = kSize;
  generating.all_weights = true;  // of two layers: as many as are counted without
  EXPECT_EQ(fixed_bytes(*model.transformer, generating), fixed_bytes(*model.transformer, kSize));
  EXPECT_EQ(all_layer_bytes(*model.transformer), 2 * largest_layer_bytes(*model.transformer));
}

// Counts layer passes.
class Passes final : public Progress {
 public:
  void begin(const std::string&, int64_t, const std::string&) override {}
  void advance(int64_t) override { ++count; }
  void end() override {}
  void note(const std::string&) override {}
  int count = 0;
};

TEST(MultiForward, BatchesPassTogetherAsFarAsThereIsRoomAndGiveTheSameStates) {
  const Model model(make_tensors());
  std::vector<torch::Tensor> batches;
  for (int i = 0; i < 4; ++i) batches.push_back(torch::randint(0, 64, {2, 16}, torch::kInt64));
  const auto run = [&](int64_t room, std::vector<int>& passes_before) {
    Passes passes;
    std::vector<torch::Tensor> states;
    run_multi_forward(
        *model.transformer, {.engines = {nullptr, nullptr}, .hidden_state_room = room}, batches,
        [&](size_t, const std::vector<torch::Tensor>& hidden, const std::vector<OutputError>&) {
          passes_before.push_back(passes.count);
          states.push_back(hidden[0].clone());
        },
        passes);
    return torch::stack(states);
  };
  std::vector<int> alone, pairs, together;
  const torch::Tensor one = run(1, alone);
  constexpr int64_t kBatch = 2 * 16 * 24 * 4 * 2;
  EXPECT_TRUE(run(2 * kBatch, pairs).equal(one));
  EXPECT_TRUE(run(1 << 30, together).equal(one));
  EXPECT_EQ(alone, (std::vector<int>{2, 4, 6, 8}));  // two layers
  EXPECT_EQ(pairs, (std::vector<int>{4, 4, 8, 8}));
  EXPECT_EQ(together, (std::vector<int>{8, 8, 8, 8}));
}

}  // namespace
