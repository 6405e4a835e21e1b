// Held-back chunks are placed at served positions, and arrive in batches of any size.
#include "oscar/search/pass.h"

#include <gtest/gtest.h>

#include "oscar/calibrate/collector.h"
#include "oscar/checkpoint/checkpoint.h"
#include "oscar/fit/position_average.h"
#include "oscar/model/attention.h"

namespace {

using namespace oscar;

Rope partial_rope() {
  Rope rope;
  rope.rotary_dim = 12;
  for (int i = 0; i < 6; ++i) rope.inv_freq.push_back(std::pow(1e4, -i / 6.0));
  return rope;
}

TEST(MovePositions, IsRopeAtALaterPosition) {
  const Rope rope = partial_rope();
  torch::manual_seed(1);
  const auto x = torch::randn({1, 2, 50, 16});
  const auto roped = [&](int64_t begin) {
    const auto position = torch::arange(begin, begin + 50, torch::kFloat64).unsqueeze(1);
    const auto angle = position * torch::tensor(rope.inv_freq, torch::kFloat64);
    const auto turned = apply_rope(x.slice(3, 0, 12), angle.cos().to(torch::kFloat32),
                                   angle.sin().to(torch::kFloat32));
    return torch::cat({turned, x.slice(3, 12)}, 3);
  };
  const auto shifted = move_positions(roped(7)[0], rope, torch::tensor({90000}));
  EXPECT_LT((shifted - roped(90007)[0]).abs().max().item<double>(), 1e-5);
  const auto scores = [](const torch::Tensor& rows) {
    return torch::matmul(rows, rows.transpose(1, 2));
  };
  EXPECT_LT((scores(shifted) - scores(roped(7)[0])).abs().max().item<double>(), 1e-4);
}

TEST(PlacementOffsets, OneInEachPartOfTheSpan) {
  const auto offsets = placement_offsets(131072, 4, 9);
  ASSERT_EQ(offsets.size(), 4u);
  for (int64_t i = 0; i < 4; ++i) {
    const auto share = static_cast<double>(i);
    EXPECT_GE(offsets[i], static_cast<int64_t>(served_position(share / 4, 131072)));
    EXPECT_LE(static_cast<double>(offsets[i]), served_position((share + 1) / 4, 131072));
  }
  EXPECT_EQ(placement_offsets(131072, 4, 9), offsets);
  EXPECT_NE(placement_offsets(131072, 4, 10), offsets);
  EXPECT_EQ(placement_offsets(0, 3, 9), (std::vector<int64_t>{0, 0, 0}));
}

TEST(SearchPass, ABatchOfChunksGivesTheDecisionsOfSingleChunks) {
  const Checkpoint checkpoint = open_checkpoint("tiny-gqa", {});
  const Transformer model(checkpoint, {torch::kCPU, torch::kFloat32});
  torch::manual_seed(3);
  const auto rows = [](int64_t heads) { return torch::randn({4, heads, 480, 128}); };
  const AttentionRecord all{.layer = 0, .q = rows(8), .k = rows(2), .v = rows(2), .o = rows(8)};
  MomentCollector collector(model.config().geometry(0, 256), torch::kCPU);
  collector.observe(all);
  std::vector<LayerStatistics> statistics = {collector.result()};
  statistics[0].o_proj_metric = model.o_proj_metric(0);
  SearchSettings settings{
      .fit = {.position_span = 1000}, .search = {.clip = true}, .quantizer = {}};
  const auto decisions = [&](int64_t batch) {
    SearchPass pass(model, statistics, settings, 2, 2);
    for (int64_t i = 0; i < 4; i += batch) {
      const auto part = [&](const torch::Tensor& t) { return t.slice(0, i, i + batch); };
      pass.observer(0)->observe(
          {.layer = 0, .q = part(all.q), .k = part(all.k), .v = part(all.v), .o = part(all.o)});
    }
    pass.layer_done({});
    return pass.take_decisions();
  };
  const auto single = decisions(1), joined = decisions(4);
  EXPECT_EQ(single[0].main.search, joined[0].main.search);
  EXPECT_EQ(single[0].main.key.recipe.clip_ratio, joined[0].main.key.recipe.clip_ratio);
  EXPECT_EQ(single[0].main.predicted_output_nmse, joined[0].main.predicted_output_nmse);
}

TEST(SearchPass, LayersOfOtherProcessesAreNeitherObservedNorDecided) {
  const Checkpoint checkpoint = open_checkpoint("tiny-gqa", {});
  const Transformer model(checkpoint, {torch::kCPU, torch::kFloat32});
  std::vector<LayerStatistics> statistics(2);
  for (int layer = 0; layer < 2; ++layer) {
    statistics[static_cast<size_t>(layer)].geometry = model.config().geometry(layer, 256);
  }
  SearchPass pass(model, statistics, {.fit = {}, .search = {.clip = true}, .quantizer = {}}, 2, 2,
                  1, {false, false});
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(pass.observer(layer), nullptr);
    pass.layer_done({});
  }
  const auto decisions = pass.take_decisions();
  ASSERT_EQ(decisions.size(), 2u);
  EXPECT_TRUE(decisions[1].choices.empty());
}

}  // namespace
