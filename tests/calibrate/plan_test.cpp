// Batches depend on the chunks and batch_tokens alone.
#include "oscar/calibrate/plan.h"

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

// Seven batches of one chunk each, of i + 1 tokens, in shards of three.
RunPlan plan_of_seven() {
  RunPlan plan;
  plan.batches = plan_batches(chunks_of({1, 2, 3, 4, 5, 6, 7}), 1);
  plan.shards = {{0, 3, 6}, {3, 3, 15}, {6, 1, 7}};
  return plan;
}

std::string text_of(const std::vector<Shard>& shards) {
  std::string text;
  for (const Shard& shard : shards) {
    for (size_t i = 0; i < shard.num_batches; ++i) text += std::to_string(shard.first_batch + i);
    text += "=" + std::to_string(shard.tokens) + " ";
  }
  return text;
}

TEST(ShardsFrom, TheBeginningAreAllAndTheEndNone) {
  EXPECT_EQ(text_of(shards_from(plan_of_seven(), 0, 0)), "012=6 345=15 6=7 ");
  EXPECT_EQ(text_of(shards_from(plan_of_seven(), 7, 0)), "");
}

TEST(ShardsFrom, APositionInsideAShardLeavesTheRestOfIt) {
  EXPECT_EQ(text_of(shards_from(plan_of_seven(), 3, 0)), "345=15 6=7 ");
  EXPECT_EQ(text_of(shards_from(plan_of_seven(), 4, 0)), "45=11 6=7 ");
  EXPECT_EQ(text_of(shards_from(plan_of_seven(), 6, 0)), "6=7 ");
}

TEST(ShardsFrom, BatchesBetweenTwoLayersStayTogetherAndComeFirst) {
  EXPECT_EQ(text_of(shards_from(plan_of_seven(), 2, 3)), "234=12 5=6 6=7 ");
  EXPECT_EQ(text_of(shards_from(plan_of_seven(), 0, 1)), "0=1 12=5 345=15 6=7 ");
  EXPECT_EQ(text_of(shards_from(plan_of_seven(), 0, 7)), "0123456=28 ");
}

}  // namespace
