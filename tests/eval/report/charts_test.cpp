// Scales, axes and lines of the page's charts.
#include "oscar/eval/report/charts.h"

#include <gtest/gtest.h>
#include <cmath>
#include <limits>

#include "eval/report/sample.h"

namespace oscar {
namespace {

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

TEST(Chart, NamesOfPointsInOnePlaceKeepApart) {
  ScatterChart chart{.id = "c",
                     .title = "t",
                     .description = "d",
                     .x = {"x", 0, 16, false, {}},
                     .y = {"y", 0, 1, false, {}}};
  for (int i = 0; i < 8; ++i) chart.points.push_back({fmt::format("m{}", i), 3, 0.5, i});
  chart.points.push_back({"right", 16, 0, 8});
  const std::string svg = draw(chart);
  EXPECT_EQ(report_sample::malformed(svg), "");
  std::vector<double> heights;
  for (size_t at = 0; (at = svg.find("class=\"label", at)) != std::string::npos; ++at) {
    const size_t y = svg.rfind("y=\"", at);
    heights.push_back(std::stod(svg.substr(y + 3)));
  }
  ASSERT_EQ(heights.size(), 9u);
  for (size_t i = 1; i < 8; ++i) EXPECT_GE(heights[i] - heights[i - 1], 13.9);
  EXPECT_TRUE(svg.find("label t8 end") != std::string::npos) << "on the left at the right end";
}

TEST(Chart, ValuesAtTheLimitsOfADoubleGetAFewTicks) {
  const double tiny = 5e-324, huge = std::numeric_limits<double>::max();
  for (const bool log : {false, true}) {
    for (const auto& values : std::vector<std::vector<double>>{{tiny},
                                                               {tiny, 1},
                                                               {0, tiny},
                                                               {-huge, huge},
                                                               {huge},
                                                               {1, std::nextafter(1, 2)},
                                                               {1e17, 1e17 + 16},
                                                               {tiny, huge}}) {
      const AxisSpec axis = axis_over(values, log, "");
      EXPECT_LT(axis.low, axis.high);
      const auto ticks = ticks_of(axis);
      EXPECT_LE(ticks.size(), 60u);
      const Scale scale = make_scale(axis, 0, 100);
      for (const double v : values) EXPECT_TRUE(std::isfinite(scale(v))) << v;
    }
  }
}

}  // namespace
}  // namespace oscar
