#include "oscar/text/repeats.h"

#include <gtest/gtest.h>
#include <random>

// Copies in a text, whatever lies between them.

namespace oscar {
namespace {

std::vector<int32_t> random_text(size_t tokens, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> ids(tokens);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % 500);
  return ids;
}

TEST(Repeats, ATextOfNCopiesRepeatsAllButOne) {
  const auto text = random_text(700, 1);
  EXPECT_EQ(repeated_share({text}), 0);
  EXPECT_DOUBLE_EQ(repeated_share({text, text, text, text}), 0.75);
}

TEST(Repeats, CopiesCountWhereverTheyBegin) {
  const auto text = random_text(1000, 2);
  const std::vector<int32_t> later(text.begin() + 437, text.end());
  const auto stretches = [](size_t tokens) {
    return static_cast<double>(tokens - kRepeatedTokens + 1);
  };
  EXPECT_DOUBLE_EQ(repeated_share({text, later}),
                   stretches(563) / (stretches(1000) + stretches(563)));
}

TEST(Repeats, ShorterStretchesAreNone) {
  const auto text = random_text(kRepeatedTokens - 1, 3);
  EXPECT_EQ(repeated_share({text, text, {}}), 0);
}

TEST(Repeats, OfMuchTextASampleTells) {
  const auto text = random_text(size_t{1} << 20, 4);
  EXPECT_NEAR(repeated_share({text, text}), 0.5, 0.02);
}

}  // namespace
}  // namespace oscar
