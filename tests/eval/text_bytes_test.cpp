// Figures of a text that came from another process are those that were counted there.
#include <gtest/gtest.h>
#include <cmath>

#include "oscar/base/error.h"
#include "oscar/eval/session.h"

namespace {

using namespace oscar;

TEST(TextBytes, BecomeTheSameFiguresToTheBit) {
  TextState text;
  for (int method = 0; method < 2; ++method) {
    const double x = std::sqrt(2.0 + method);
    text.scores.push_back({.nll = {x, -x, x / 3}, .kl = {0, 1e-300, x}, .agrees = {1, 0, 1}});
    text.errors.push_back({.error = {{x, 0}, {1, 2}, {3, x}}, .energy = {{4, 5}, {x, x}, {6, 7}}});
  }
  const EvaluationShape shape{.methods = 2, .layers = 3, .heads = 2};
  const std::vector<uint8_t> bytes = text_bytes(text);
  const TextState read = text_from_bytes(bytes, shape);
  ASSERT_EQ(read.scores.size(), 2u);
  for (size_t m = 0; m < 2; ++m) {
    EXPECT_EQ(read.scores[m].nll, text.scores[m].nll);
    EXPECT_EQ(read.scores[m].kl, text.scores[m].kl);
    EXPECT_EQ(read.scores[m].agrees, text.scores[m].agrees);
    EXPECT_EQ(read.errors[m].error, text.errors[m].error);
    EXPECT_EQ(read.errors[m].energy, text.errors[m].energy);
  }
  EXPECT_THROW(text_from_bytes({bytes.begin(), bytes.end() - 8}, shape), Error);
  EXPECT_THROW(text_from_bytes({1, 2, 3}, shape), Error);
}

}  // namespace
