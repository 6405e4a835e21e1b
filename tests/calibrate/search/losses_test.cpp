// Sums of losses as a table, and how two pairs compare.
#include "oscar/calibrate/search/losses.h"

#include <gtest/gtest.h>

namespace {

using namespace oscar;

TEST(LossTable, DifferencesCarryTheSpreadOverBlocks) {
  LossTable table{
      .pairs = 2, .heads = 1, .blocks = 4, .sums = {5, 6, 7, 8, 4, 6, 5, 7}, .energy = {}};
  const LossDifference d = compare(table, 1, 0, 0);
  EXPECT_DOUBLE_EQ(d.difference, -4);
  // Differences -1, 0, -2, -1: variance 2/3, of a sum of four 8/3.
  EXPECT_DOUBLE_EQ(d.standard_error, std::sqrt(8.0 / 3));
  EXPECT_TRUE(d.better());
  EXPECT_FALSE(compare(table, 0, 1, 0).better());
  table.blocks = 1;
  table.sums = {2, 1};
  EXPECT_FALSE(compare(table, 1, 0, 0).better()) << "one block says nothing about its spread";
}

}  // namespace
