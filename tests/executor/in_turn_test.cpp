// One process does all pieces, and takes each as soon as it is done. Several processes are tested
// in tests/cli/test_several_processes_eval.py.
#include "oscar/executor/in_turn.h"

#include <gtest/gtest.h>

#include "oscar/executor/own_part.h"

namespace {

using namespace oscar;

TEST(WorkInTurn, OneProcessTakesWhatItHasDoneInOrder) {
  Ranks one;
  std::vector<size_t> taken;
  work_in_turn(
      one, 2, 5,
      [&](const std::vector<size_t>& pieces, const PieceDone& done) {
        EXPECT_EQ(pieces, (std::vector<size_t>{2, 3, 4}));
        for (const size_t piece : pieces) {
          done(piece, {static_cast<uint8_t>(piece)});
          EXPECT_EQ(taken.back(), piece);
        }
      },
      [&](size_t piece, const std::vector<uint8_t>& result, bool own) {
        EXPECT_EQ(result, std::vector<uint8_t>{static_cast<uint8_t>(piece)});
        EXPECT_TRUE(own);
        taken.push_back(piece);
      });
  EXPECT_EQ(taken, (std::vector<size_t>{2, 3, 4}));
  EXPECT_EQ(longest_part(one, torch::kCPU, 3), 1.0);
  EXPECT_EQ(longest_part(one, torch::kCPU, 0), 0.0);
}

}  // namespace
