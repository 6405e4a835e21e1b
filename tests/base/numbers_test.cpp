// How figures are written.
#include "oscar/base/numbers.h"

#include <gtest/gtest.h>

#include <cmath>

namespace oscar {
namespace {

TEST(Numbers, KeepThreeSignificantDigitsOverAllSizes) {
  EXPECT_EQ(figure(8.9431), "8.94");
  EXPECT_EQ(figure(0.00902), "0.00902");
  EXPECT_EQ(figure(6946.2), "6,946");
  EXPECT_EQ(figure(-0.5), "−0.500");
  EXPECT_EQ(figure(0.0), "0");
  EXPECT_EQ(figure(2.13e-7), "2.1×10⁻⁷");
  EXPECT_EQ(figure(-3e12, 1), "−3×10¹²");
}

TEST(Numbers, SayWhenAFigureIsAbsentOrNotFinite) {
  for (const auto& text : {figure(Figure()), percent(Figure()), count(Figure())})
    EXPECT_EQ(text, "–");
  for (const double x : {NAN, INFINITY, -INFINITY}) {
    for (const auto& text : {figure(x), percent(x), signed_percent(x), count(x), token_length(x),
                             times(x), with_interval(x, 0.0, 1.0)}) {
      EXPECT_EQ(text, "not finite");
    }
  }
}

TEST(Numbers, WriteSharesLengthsAndCounts) {
  EXPECT_EQ(percent(0.9541), "95.4%");
  EXPECT_EQ(percent(0.94, 0), "94%");
  EXPECT_EQ(signed_percent(0.0089), "+0.9%");
  EXPECT_EQ(signed_percent(-0.0002), "0.0%") << "no minus before a zero";
  EXPECT_EQ(signed_percent(779.0), "780×") << "and not 77,900%";
  EXPECT_EQ(figure(1e-4, 1), "10⁻⁴");
  EXPECT_EQ(count(121066.0), "121,066");
  EXPECT_EQ(token_length(131072.0), "128K");
  EXPECT_EQ(token_length(3968.0), "3,968");
  EXPECT_EQ(times(11.23), "11 times");
  EXPECT_EQ(times(2.34), "2.3 times");
  EXPECT_EQ(ordinal(64) + ordinal(1) + ordinal(512) + ordinal(103) + ordinal(111) + ordinal(0),
            "64th1st512th103rd111th0th");
}

TEST(Numbers, RoundAnIntervalToWhatItsWidthWarrants) {
  EXPECT_EQ(with_interval(0.00902, 0.00843, 0.00961), "0.00902 [0.00843, 0.00961]");
  EXPECT_EQ(with_interval(6.661, 6.561, 6.761), "6.66 [6.56, 6.76]");
  EXPECT_EQ(with_interval(6946.0, 6500.0, 7400.0), "6,946 [6,500, 7,400]");
  EXPECT_EQ(with_interval(0.5, Figure(), Figure()), "0.500");
  EXPECT_EQ(with_interval(0.5, 0.5, NAN), "0.500");
}

}  // namespace
}  // namespace oscar
