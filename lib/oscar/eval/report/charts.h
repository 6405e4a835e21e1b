// Charts as SVG.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace oscar {

// Charts as SVG text, drawn for a width of 400 units: readable on a phone and in a column.
//
// Colours are CSS classes (page.h), so that dark mode and print can change them. A series is
// told apart by colour, dash pattern, marker and its label beside the line.

inline constexpr int kSeriesStyles = 8;

struct Tick {
  double value = 0;
  std::string label = {};
};

struct AxisSpec {
  std::string title = {};
  double low = 0, high = 1;  // both positive when log
  bool log = false;
  std::vector<Tick> ticks = {};  // empty: chosen from low and high
};

enum class SeriesMark : uint8_t {
  kMarkedLine,  // with a marker at each point, where they are few
  kLine,
  kThinLine,  // of many points
  kDots       // no line
};

struct Series {
  std::string name = {};                               // label beside the line's end; empty: none
  std::vector<std::pair<double, double>> points = {};  // those that are not finite are left out
  int style = 0;                                       // 0 .. kSeriesStyles - 1
  std::string css = {};                                // class that replaces the style's
  SeriesMark mark = SeriesMark::kMarkedLine;
};

struct LineChart {
  std::string id = {};
  std::string title = {}, description = {};  // for readers who do not see the picture
  AxisSpec x = {}, y = {};
  std::vector<Series> series = {};
  std::vector<std::pair<double, std::string>> levels = {};  // horizontal reference lines
};

struct ScatterPoint {
  std::string name = {};  // label beside it; empty: none
  double x = 0, y = 0;
  int style = 0;
};

struct ScatterChart {
  std::string id = {}, title = {}, description = {};
  AxisSpec x = {}, y = {};
  std::vector<ScatterPoint> points = {};
};

struct IntervalRow {
  std::string name = {}, value = {};   // label on the left, figure on the right
  double mean = 0, low = 0, high = 0;  // low = high = mean: no interval
  int style = 0;
};

struct IntervalChart {
  std::string id = {}, title = {}, description = {};
  AxisSpec x = {};
  std::vector<IntervalRow> rows = {};
  std::vector<std::pair<double, std::string>> levels = {};  // vertical reference lines
};

struct HeatCell {
  size_t column = 0, row = 0;
  double value = 0;  // 0 .. 1
  std::string label = {}, tooltip = {};
};

// Cells that are too narrow for their labels are drawn without them and without tooltips.
struct HeatMap {
  std::string id = {}, title = {}, description = {};
  std::string column_title = {}, row_title = {};
  std::vector<std::string> columns = {}, rows = {};
  std::vector<HeatCell> cells = {};
};

std::string draw(const LineChart& chart);
std::string draw(const ScatterChart& chart);
std::string draw(const IntervalChart& chart);
std::string draw(const HeatMap& map);

// Width in units of a map of `columns` columns, 400 at most; shown at one pixel a unit or a little
// more.
double heat_map_width(size_t columns);

// An axis from `low` to `high` over all finite values (positive ones when log): widened to whole
// decades or half decades when log, to round numbers otherwise. [0.1, 1] when there are none.
AxisSpec axis_over(const std::vector<double>& values, bool log, std::string title);

// From values to places on an axis, and the ticks between its ends.

// Linear or logarithmic map of [axis.low, axis.high] onto [from, to]; values outside are held at
// the ends.
struct Scale {
  double low = 0, high = 1, from = 0, to = 1;
  bool log = false;

  double operator()(double value) const;
};

Scale make_scale(const AxisSpec& axis, double from, double to);

// The axis's own ticks, or chosen ones: decades when log, about `wanted` round steps otherwise.
std::vector<Tick> ticks_of(const AxisSpec& axis, int wanted = 5);

// How much of a name fits beside a chart.
inline constexpr size_t kLabelCharacters = 16;

// Coordinates with one decimal, without a needless ".0".
std::string coordinate(double x);

// Parts of an SVG. Texts are escaped here.
// Shown as wide as there is room, or as `widest` pixels.
std::string svg_begin(const std::string& id, const std::string& title,
                      const std::string& description, double width, double height,
                      double widest = 0);
std::string svg_text(double x, double y, const char* css, const std::string& text);
std::string svg_line(double x1, double y1, double x2, double y2, const std::string& css);

}  // namespace oscar
