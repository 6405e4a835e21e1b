// Overlapping windows score every token once, each with a full context.
#include "oscar/eval/strided_windows.h"

#include <gtest/gtest.h>

#include "oscar/base/error.h"

namespace {

using oscar::strided_windows;

// Tokens 0 .. count - 1 of one source, cut every `stride`.
oscar::TokenChunks stream(int count, int stride, const char* kind = "text") {
  oscar::TokenChunks pieces;
  for (int i = 0; i < count; ++i) {
    if (i % stride == 0) pieces.chunks.emplace_back();
    pieces.chunks.back().push_back(i);
  }
  pieces.record.sources.push_back({.name = "a", .kind = kind});
  pieces.record.tokens = count;
  return pieces;
}

TEST(StridedWindows, EachScoredTokenHasTheWholeStreamBeforeItUpToTheWindow) {
  const auto windows = strided_windows(stream(23, 4), 12, 4);  // the piece of 3 is left out
  ASSERT_EQ(windows.size(), 3u);
  int next = 8;  // the first token with 8 before it
  for (const auto& window : windows) {
    ASSERT_EQ(window.size(), 12u);
    for (int i = 0; i < 12; ++i) EXPECT_EQ(window[i], window[0] + i);
    for (int i = 8; i < 12; ++i) EXPECT_EQ(window[i], next++);
  }
  EXPECT_EQ(next, 20);
}

TEST(StridedWindows, AStrideOfTheWindowCutsWithoutOverlap) {
  const auto windows = strided_windows(stream(24, 8), 8, 8);
  ASSERT_EQ(windows.size(), 3u);
  EXPECT_EQ(windows[2].front(), 16);
}

TEST(StridedWindows, CorporaThatAreNoSingleStreamAreRefused) {
  EXPECT_THROW(strided_windows(stream(24, 4), 10, 4), oscar::Error);
  EXPECT_THROW(strided_windows(stream(11, 4), 12, 4), oscar::Error);
  EXPECT_THROW(strided_windows(stream(24, 4, "ids_2d"), 8, 4), oscar::Error);
  auto two = stream(24, 4);
  two.record.sources.push_back(two.record.sources.front());
  EXPECT_THROW(strided_windows(two, 8, 4), oscar::Error);
}

}  // namespace
