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

}  // namespace
