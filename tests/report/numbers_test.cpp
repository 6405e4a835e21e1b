// How figures are written, and how texts are escaped and shortened.
#include "oscar/report/numbers.h"

#include <gtest/gtest.h>

#include <cmath>

#include "oscar/report/chart.h"
#include "oscar/report/html.h"
#include "oscar/report/scale.h"
#include "report/sample.h"

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
}

TEST(Numbers, RoundAnIntervalToWhatItsWidthWarrants) {
  EXPECT_EQ(with_interval(0.00902, 0.00843, 0.00961), "0.00902 [0.00843, 0.00961]");
  EXPECT_EQ(with_interval(6.661, 6.561, 6.761), "6.66 [6.56, 6.76]");
  EXPECT_EQ(with_interval(6946.0, 6500.0, 7400.0), "6,946 [6,500, 7,400]");
  EXPECT_EQ(with_interval(0.5, Figure(), Figure()), "0.500");
  EXPECT_EQ(with_interval(0.5, 0.5, NAN), "0.500");
}

TEST(Html, EscapesMarkupAndReplacesWhatIsNoText) {
  EXPECT_EQ(escape_html("a<b>&\"'"), "a&lt;b&gt;&amp;&quot;&#39;");
  EXPECT_EQ(escape_html("\xc3\xa9 \xf0\x9f\x98\x80"), "\xc3\xa9 \xf0\x9f\x98\x80");
  const std::string bad = "\xEF\xBF\xBD";
  for (const char* text :
       {"\xff", "\xc3", "\xc0\xaf" /* overlong */, "\xed\xa0\x80" /* surrogate */, "\x01", "\x7f",
        "\xe2\x80\xae" /* turns the direction */}) {
    EXPECT_EQ(escape_html(text).substr(0, 3), bad) << text;
  }
}

TEST(Html, ShortensAtTheStartBetweenCharacters) {
  EXPECT_EQ(shortened("bundle", 6), "bundle");
  EXPECT_EQ(shortened("oscar-released@clip:0/0", 10), "…@clip:0/0");
  EXPECT_EQ(shortened("ééééé", 3), "…éé");
  EXPECT_EQ(shortened("\x80\x80\x80", 1), "\x80\x80\x80");
}

TEST(Chart, ALogarithmicScalePutsDecadesAtEqualDistance) {
  const Scale scale = make_scale({"", 0.01, 1, true, {}}, 0, 100);
  EXPECT_NEAR(scale(0.1), 50, 1e-9);
  EXPECT_EQ(scale(0), 0) << "what does not fit is held at the end";
  EXPECT_EQ(scale(50), 100);
}

TEST(Chart, AxesCoverTheirValuesAndIgnoreWhatCanNotBeDrawn) {
  const AxisSpec axis = axis_over({0.02, NAN, -1, 0, 6.66, INFINITY}, true, "");
  EXPECT_LE(axis.low, 0.02);
  EXPECT_GE(axis.high, 6.66);
  EXPECT_GE(axis.low, 0.001);
  const AxisSpec nothing = axis_over({NAN}, true, "");
  EXPECT_LT(nothing.low, nothing.high);
  for (const AxisSpec& a : {axis, axis_over({5}, true, ""), axis_over({5}, false, ""), nothing}) {
    EXPECT_LT(a.low, a.high);
    for (const Tick& tick : ticks_of(a)) {
      EXPECT_GE(tick.value, a.low * (1 - 1e-9));
      EXPECT_LE(tick.value, a.high * (1 + 1e-9));
    }
  }
}

TEST(Chart, LinesBreakWhereAValueIsMissing) {
  LineChart chart{.id = "c",
                  .title = "t",
                  .description = "d",
                  .x = {"x", 0, 3, false, {}},
                  .y = {"y", 0, 3, false, {}}};
  chart.series = {{.name = "one", .points = {{0, 1}, {1, NAN}, {2, 1}, {3, 2}}}};
  const std::string svg = draw(chart);
  EXPECT_EQ(report_sample::malformed(svg), "");
  const size_t path = svg.find("<path d=\"M");
  ASSERT_NE(path, std::string::npos);
  const std::string line = svg.substr(path, svg.find("class=", path) - path);
  EXPECT_EQ(report_sample::occurrences(line, "M"), 2u);
  EXPECT_EQ(report_sample::occurrences(line, "L"), 1u);
}

}  // namespace
}  // namespace oscar
