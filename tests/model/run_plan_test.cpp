// Batches depend on the sequences and batch_tokens alone.
#include "oscar/model/run_plan.h"

#include <gtest/gtest.h>

#include "oscar/base/error.h"

namespace {

using namespace oscar;

std::vector<std::vector<int32_t>> sequences_of(std::initializer_list<int> lengths) {
  std::vector<std::vector<int32_t>> sequences;
  for (const int length : lengths) sequences.emplace_back(length, 1);
  return sequences;
}

TEST(PlanBatches, JoinsConsecutiveSequencesOfEqualLengthUpToTheTokenLimit) {
  const auto batches = plan_batches(sequences_of({8, 8, 8, 8, 8}), 24);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[0].num_sequences, 3);
  EXPECT_EQ(batches[1].num_sequences, 2);
  EXPECT_EQ(batches[1].first_sequence, 3);
}

TEST(PlanBatches, NeverMixesLengthsAndKeepsTheOrder) {
  const auto batches = plan_batches(sequences_of({8, 4, 4, 8}), 1000);
  ASSERT_EQ(batches.size(), 3u);
  EXPECT_EQ(batches[0].length, 8);
  EXPECT_EQ(batches[1].num_sequences, 2);
  EXPECT_EQ(batches[2].first_sequence, 3);
}

TEST(PlanBatches, GivesASequenceLongerThanTheLimitABatchOfItsOwn) {
  const auto batches = plan_batches(sequences_of({100, 100}), 10);
  ASSERT_EQ(batches.size(), 2u);
  EXPECT_EQ(batches[0].tokens(), 100);
}

// Batches of eight tokens each, hidden states of a byte a token, and no weights.
RunPlan plan_of(int64_t bytes, bool at_once, int64_t wave_sequences = 0) {
  MemoryNeeds needs;
  needs.hidden_of_token = 1;
  needs.hidden_at_once = at_once;
  return plan_run(plan_batches(sequences_of({8, 8, 8, 8, 8}), 8), std::move(needs),
                  {.host_bytes = bytes}, torch::kCPU, wave_sequences);
}

TEST(PlanRun, AWaveIsWhatHiddenStatesHaveRoomFor) {
  EXPECT_EQ(plan_of(40, false).waves.size(), 1u);
  EXPECT_EQ(plan_of(39, false).waves.size(), 2u);
  EXPECT_EQ(plan_of(16, false).waves.size(), 3u);
  EXPECT_EQ(plan_of(16, false).peak.host_bytes, 16);
  EXPECT_EQ(plan_of(1000, false, /*wave_sequences=*/3).waves.size(), 2u);
}

TEST(PlanRun, WhatMustPassAtOnceIsOneWaveOrRefused) {
  EXPECT_EQ(plan_of(40, true).waves.size(), 1u);
  EXPECT_EQ(plan_of(40, true).peak.host_bytes, 40);
  EXPECT_THROW(plan_of(39, true), Error);
}

// Seven batches of one sequence each, of i + 1 tokens, in waves of three.
RunPlan plan_of_seven() {
  RunPlan plan;
  plan.batches = plan_batches(sequences_of({1, 2, 3, 4, 5, 6, 7}), 1);
  plan.waves = {{0, 3, 6}, {3, 3, 15}, {6, 1, 7}};
  return plan;
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
