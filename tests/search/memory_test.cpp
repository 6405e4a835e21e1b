// What a search is said to take: the rows that are held back, and the rest within its limits.
#include "oscar/search/memory.h"

#include <gtest/gtest.h>

namespace {

using namespace oscar;

ModelConfig config_of(int num_qo_heads, int num_kv_heads, int head_dim) {
  ModelConfig config;
  config.num_qo_heads = num_qo_heads;
  config.num_kv_heads = num_kv_heads;
  config.head_dim = head_dim;
  return config;
}

constexpr int64_t kLength = 4096;

int64_t bytes_of(const ModelConfig& config, int64_t chunks, bool full = false,
                 torch::Device device = torch::kCPU) {
  return search_memory_bytes(
      config, {.tokens = chunks * kLength, .search_chunks = chunks / 2, .longest_chunk = kLength},
      {.kind = TransformKind::kBalanced},
      {.kind = true, .center = true, .granularity = true, .row_weights = true, .full = full},
      device);
}

// With many chunks what is kept is at its limit, and so is all else but the rows.
TEST(SearchMemory, GrowsWithTheRowsThatAreHeldBackAlone) {
  const ModelConfig config = config_of(32, 8, 128);
  const int64_t of_token = (32 + 2 * 8) * 128 * 4;
  for (const torch::Device device : {torch::Device(torch::kCPU), torch::Device("cuda")}) {
    EXPECT_EQ(bytes_of(config, 64, true, device) - bytes_of(config, 32, true, device),
              2 * 32 * kLength * of_token);
  }
}

TEST(SearchMemory, AFullSearchKeepsMoreUpToTheLimit) {
  const ModelConfig config = config_of(4, 2, 32);
  const int64_t query = 2 * 4 * kLength * 4;  // its scores and weights
  EXPECT_EQ(bytes_of(config, 4, true) - bytes_of(config, 4, false),
            2 * (kSearchFull - kSearchQuick) * query);
  EXPECT_EQ(bytes_of(config, 256, true), bytes_of(config, 256, false));
}

TEST(SearchMemory, ClippingAloneTakesLessThanASearchOfTransforms) {
  const ModelConfig config = config_of(4, 2, 32);
  const int64_t rows = 2 * 6 * kLength * 2 * 32 * 4;  // of six candidates less of each side
  EXPECT_LT(search_memory_bytes(
                config, {.tokens = 4 * kLength, .search_chunks = 2, .longest_chunk = kLength},
                {.kind = TransformKind::kBalanced}, {.clip = true}, torch::kCPU),
            bytes_of(config, 4) - rows);
}

TEST(SearchMemory, ASmallModelIsNotChargedTheLimitsOfALargeOne) {
  const SearchLimits& limits = search_limits(torch::Device("cuda"));
  const auto most = static_cast<int64_t>(sizeof(float)) * (limits.kept + limits.rows);
  EXPECT_LT(bytes_of(config_of(4, 2, 32), 4, false, torch::Device("cuda")), most);
  EXPECT_GT(bytes_of(config_of(64, 8, 128), 16, true, torch::Device("cuda")), most);
}

}  // namespace
