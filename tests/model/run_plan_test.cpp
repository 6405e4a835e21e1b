// Batches depend on the chunks and batch_tokens alone.
#include "oscar/model/run_plan.h"

#include <gtest/gtest.h>

namespace {

using namespace oscar;

std::vector<std::vector<int32_t>> chunks_of(std::initializer_list<int> lengths) {
  std::vector<std::vector<int32_t>> chunks;
  for (const int length : lengths) chunks.emplace_back(length, 1);
  return chunks;
}

TEST(PlanBatches, JoinsConsecutiveChunksOfEqualLengthUpToTheTokenLimit) {
  const auto batches = plan_batches(chunks_of({8, 8, 8, 8, 8}), 24);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[0].num_chunks, 3);
  EXPECT_EQ(batches[1].num_chunks, 2);
  EXPECT_EQ(batches[1].first_chunk, 3);
}

TEST(PlanBatches, NeverMixesLengthsAndKeepsTheOrder) {
  const auto batches = plan_batches(chunks_of({8, 4, 4, 8}), 1000);
  ASSERT_EQ(batches.size(), 3u);
  EXPECT_EQ(batches[0].length, 8);
  EXPECT_EQ(batches[1].num_chunks, 2);
  EXPECT_EQ(batches[2].first_chunk, 3);
}

TEST(PlanBatches, GivesAChunkLongerThanTheLimitABatchOfItsOwn) {
  const auto batches = plan_batches(chunks_of({100, 100}), 10);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[0].tokens(), 100);
}

// Seven batches of one chunk each, of i + 1 tokens, in waves of three.
RunPlan plan_of_seven() {
  RunPlan plan;
  plan.batches = plan_batches(chunks_of({1, 2, 3, 4, 5, 6, 7}), 1);
  plan.waves = {{0, 3, 6}, {3, 3, 15}, {6, 1, 7}};
  return plan;
}

TEST(InOneWave, AddsHiddenStatesOfWhatTheLargestWaveLeavesOutWhereTheyLie) {
  RunPlan plan = plan_of_seven();
  plan.hidden_bytes_per_token = 10;
  plan.peak_host_bytes = 1000;
  plan.peak_device_bytes = 2000;
  constexpr int64_t kMore = (28 - 15) * 10;  // 15 tokens of hidden states are in the peaks
  const RunPlan on_cpu = in_one_wave(plan, torch::kCPU);
  EXPECT_EQ(on_cpu.waves.size(), 1u);
  EXPECT_EQ(on_cpu.waves[0].num_batches, 7u);
  EXPECT_EQ(on_cpu.waves[0].tokens, 28);
  EXPECT_EQ(on_cpu.peak_host_bytes, 1000 + kMore);
  const RunPlan on_gpu = in_one_wave(plan, torch::kCUDA);
  EXPECT_EQ(on_gpu.peak_host_bytes, 1000);
  EXPECT_EQ(on_gpu.peak_device_bytes, 2000 + kMore);
  plan.hidden_on_device = false;  // a GPU whose hidden states lie on the host
  const RunPlan on_host = in_one_wave(plan, torch::kCUDA);
  EXPECT_EQ(on_host.peak_host_bytes, 1000 + kMore);
  EXPECT_EQ(on_host.peak_device_bytes, 2000);
}

std::string text_of(const std::vector<Wave>& waves) {
  std::string text;
  for (const Wave& wave : waves) {
    for (size_t i = 0; i < wave.num_batches; ++i) text += std::to_string(wave.first_batch + i);
    text += "=" + std::to_string(wave.tokens) + " ";
  }
  return text;
}

TEST(WavesFrom, TheBeginningAreAllAndTheEndNone) {
  EXPECT_EQ(text_of(waves_from(plan_of_seven(), 0, 0)), "012=6 345=15 6=7 ");
  EXPECT_EQ(text_of(waves_from(plan_of_seven(), 7, 0)), "");
}

TEST(WavesFrom, APositionInsideAWaveLeavesTheRestOfIt) {
  EXPECT_EQ(text_of(waves_from(plan_of_seven(), 3, 0)), "345=15 6=7 ");
  EXPECT_EQ(text_of(waves_from(plan_of_seven(), 4, 0)), "45=11 6=7 ");
  EXPECT_EQ(text_of(waves_from(plan_of_seven(), 6, 0)), "6=7 ");
}

TEST(WavesFrom, BatchesBetweenTwoLayersStayTogetherAndComeFirst) {
  EXPECT_EQ(text_of(waves_from(plan_of_seven(), 2, 3)), "234=12 5=6 6=7 ");
  EXPECT_EQ(text_of(waves_from(plan_of_seven(), 0, 1)), "0=1 12=5 345=15 6=7 ");
  EXPECT_EQ(text_of(waves_from(plan_of_seven(), 0, 7)), "0123456=28 ");
}

}  // namespace
