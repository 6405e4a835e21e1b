// Counts as people write them, and words that are none.
#include "oscar/base/parse_count.h"

#include <gtest/gtest.h>

namespace {

using namespace oscar;

TEST(ParseCount, TakesDigitsUnitsAndPowersOfTen) {
  EXPECT_EQ(parse_count("100"), 100);
  EXPECT_EQ(parse_count("-3"), -3);
  EXPECT_EQ(parse_count("64K"), 65536);
  EXPECT_EQ(parse_count("1.5m"), 3 << 19);
  EXPECT_EQ(parse_count("2G"), int64_t{2} << 30);
  EXPECT_EQ(parse_count("1e4"), 10000);
  EXPECT_EQ(parse_count("9223372036854775807"), INT64_MAX);  // to the last digit
}

TEST(ParseCount, RefusesWhatIsNoWholeNumberOrTooLarge) {
  for (const char* text : {"", "x", "1.5", "1e", "1-2", "64KB", "64 K", "0x10", "inf", "nan",
                           "1e400", "1e19", "9223372036854775808"}) {
    EXPECT_EQ(parse_count(text), std::nullopt) << text;
  }
}

}  // namespace
