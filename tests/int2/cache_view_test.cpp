// The INT2 rule against a cache simulated token by token.
#include "oscar/int2/cache_view.h"

#include <gtest/gtest.h>

#include "oscar/base/usage_error.h"

namespace {

using oscar::CacheModeKind;
using oscar::CacheView;

// A cache that appends tokens one by one and demotes whole blocks: the number of demoted tokens
// after `length` appends.
int64_t demoted_after(const CacheView& view, int64_t length) {
  int64_t demoted = 0;
  for (int64_t held = 1; held <= length; ++held) {
    const int64_t recent = held - std::min(held, view.sink) - demoted;
    if (recent - view.recent >= view.demote_block) demoted += view.demote_block;
  }
  return demoted;
}

TEST(CacheView, DecodeAgreesWithACacheSimulatedTokenByToken) {
  for (const int64_t sink : {0, 1, 4}) {
    for (const int64_t recent : {1, 3, 8}) {
      for (const int64_t block : {1, 2, 5, 16}) {
        const CacheView view{.sink = sink, .recent = recent, .demote_block = block};
        for (int64_t i = 0; i < 60; ++i) {
          ASSERT_EQ(int2_end(view, i), sink + demoted_after(view, i + 1))
              << "sink " << sink << " recent " << recent << " block " << block << " query " << i;
        }
      }
    }
  }
}

TEST(CacheView, WithBlockOneAKeyIsInt2WhenItIsOldAndNoSink) {
  const CacheView view{.sink = 4, .recent = 8};
  for (int64_t i = 0; i < 40; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      EXPECT_EQ(j >= 4 && j < int2_end(view, i), i - j >= 8 && j >= 4) << i << " " << j;
    }
  }
}

TEST(CacheView, PrefillReadsThePromptExactlyAndGeneratedTokensReadItAsInt2) {
  const CacheView view{.sink = 2, .recent = 4, .mode = CacheModeKind::kPrefill, .prompt = 20};
  const CacheView decode{.sink = 2, .recent = 4};
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(int2_end(view, i), 2);
  for (int64_t i = 20; i < 40; ++i) EXPECT_EQ(int2_end(view, i), int2_end(decode, i));
}

TEST(CacheView, AChunkSeesTheCacheAsItStoodWhenTheChunkBegan) {
  const CacheView view{.sink = 2,
                       .recent = 4,
                       .demote_block = 3,
                       .mode = CacheModeKind::kChunked,
                       .chunk = 10,
                       .prompt = 35};
  for (int64_t i = 0; i < 35; ++i) {
    EXPECT_EQ(int2_end(view, i), 2 + demoted_after(view, i / 10 * 10)) << i;
    EXPECT_LE(int2_end(view, i), std::max<int64_t>(2, i / 10 * 10)) << "own chunk is exact";
  }
  for (int64_t i = 35; i < 60; ++i) EXPECT_EQ(int2_end(view, i), 2 + demoted_after(view, i + 1));
}

TEST(CacheView, ChunkedWithChunksOfOneTokenLagsDecodeByTheOwnToken) {
  const CacheView chunked{
      .sink = 1, .recent = 3, .mode = CacheModeKind::kChunked, .chunk = 1, .prompt = 100};
  const CacheView decode{.sink = 1, .recent = 3};
  for (int64_t i = 1; i < 30; ++i) EXPECT_EQ(int2_end(chunked, i), int2_end(decode, i - 1));
}

TEST(CacheView, BlocksCoverEveryQueryOnceAndBoundTheGrowthOfTheInt2Region) {
  for (const int64_t block : {1, 7, 40}) {
    const CacheView view{.sink = 3,
                         .recent = 5,
                         .demote_block = block,
                         .mode = CacheModeKind::kChunked,
                         .chunk = 30,
                         .prompt = 77};
    int64_t next = 4;
    for (const auto& [first, last] : query_blocks(view, 4, 211, 16)) {
      ASSERT_EQ(first, next);
      ASSERT_GT(last, first);
      ASSERT_LE(last - first, 16);
      ASSERT_LE(int2_end(view, last - 1) - int2_end(view, first), 16);
      next = last;
    }
    EXPECT_EQ(next, 211);
  }
}

TEST(CacheView, ASlidingWindowHidesTheKeysBeforeIt) {
  const CacheView view{.sink = 0, .recent = 8, .sliding_window = 9};
  EXPECT_EQ(first_visible(view, 20), 12);
  EXPECT_EQ(first_visible(view, 3), 0);
}

TEST(CacheView, ModeNamesRoundTripAndNonsenseIsRefused) {
  CacheView view;
  for (const char* name : {"decode", "prefill", "chunked:2048"}) {
    parse_cache_mode(name, view);
    EXPECT_EQ(cache_mode_name(view), name);
  }
  for (const char* name : {"", "chunked", "chunked:", "chunked:0", "chunked:-4", "chunked:8k"}) {
    EXPECT_THROW(parse_cache_mode(name, view), oscar::UsageError) << name;
  }
}

TEST(CacheView, BitsPerElementMatchThePublishedFigures) {
  EXPECT_NEAR(oscar::bits_per_element({}, 131072, 64, 256), 2.284, 5e-4);
  EXPECT_NEAR(oscar::bits_per_element({}, 32768, 64, 256), 2.384, 5e-4);
  EXPECT_NEAR(oscar::bits_per_element({}, 8192, 64, 256), 2.787, 5e-4);
  EXPECT_EQ(oscar::bits_per_element({}, 320, 64, 256), 16.0);
}

}  // namespace
