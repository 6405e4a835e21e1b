// Charts as SVG.
#include "oscar/eval/report/charts.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "oscar/base/strings.h"
#include "oscar/eval/report/page.h"

namespace oscar {

// What charts with two axes share: their place, markers, and labels that keep apart.

inline constexpr double kChartWidth = 400, kChartHeight = 270;
inline constexpr double kChartLeft = 44, kChartTop = 26, kChartBottom = 40, kChartRight = 10;

// A shape of about six units at (x, y), another one for each fourth style.
std::string chart_marker(int style, double x, double y);

// Both axes with ticks, grid and titles, and horizontal reference lines.
std::string chart_frame(const AxisSpec& x_axis, const AxisSpec& y_axis, const Scale& x,
                        const Scale& y, const std::vector<std::pair<double, std::string>>& levels);

struct ChartLabel {
  double y = 0;      // of its baseline
  size_t index = 0;  // of what it names
};

// Moves labels apart without leaving the chart, keeping their order; sorts them.
void spread_labels(std::vector<ChartLabel>& labels);

// Axes and the small vocabulary of SVG that the charts share.

namespace {

// Ends of axes: what lies beyond is drawn at them. Far enough from the limits of a double that
// steps, decades and differences are ordinary numbers.
constexpr double kSmallest = 1e-290, kLargest = 1e290;
constexpr int kMostTicks = 50;

}  // namespace

double Scale::operator()(double value) const {
  const double held = std::clamp(value, low, high);
  const double part = log ? (std::log(held) - std::log(low)) / (std::log(high) - std::log(low))
                          : (held - low) / (high - low);
  return from + part * (to - from);
}

Scale make_scale(const AxisSpec& axis, double from, double to) {
  return {axis.low, axis.high, from, to, axis.log};
}

std::vector<Tick> ticks_of(const AxisSpec& axis, int wanted) {
  if (!axis.ticks.empty()) return axis.ticks;
  std::vector<Tick> ticks;
  if (!(axis.low < axis.high) || (axis.log && !(axis.low > 0))) return ticks;
  if (axis.log) {
    const int first = static_cast<int>(std::ceil(std::log10(axis.low) - 1e-9));
    const int last = static_cast<int>(std::floor(std::log10(axis.high) + 1e-9));
    const int step = std::max(1, (last - first + wanted) / std::max(1, wanted));
    for (int e = first; e <= last; e += step) {
      const double value = std::pow(10.0, e);
      ticks.push_back({value, figure(value, 1)});
    }
    return ticks;
  }
  const double raw = (axis.high - axis.low) / wanted;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = power * 10;
  for (const double factor : {5.0, 2.0, 1.0}) {
    if (power * factor >= raw) step = power * factor;
  }
  // Counted: a step may be too small to change a value.
  const double first = std::ceil(axis.low / step - 1e-9);
  for (int i = 0; i <= kMostTicks; ++i) {
    const double v = (first + i) * step;
    if (!(v <= axis.high + 1e-9 * step)) break;
    ticks.push_back({v, fmt::format("{:g}", std::abs(v) < 1e-9 * step ? 0 : v)});
  }
  return ticks;
}

AxisSpec axis_over(const std::vector<double>& values, bool log, std::string title) {
  double low = INFINITY, high = -INFINITY;
  for (const double v : values) {
    if (!std::isfinite(v) || (log && !(v > 0))) continue;
    low = std::min(low, v);
    high = std::max(high, v);
  }
  if (low > high) return {std::move(title), 0.1, 1, log, {}};
  low = std::clamp(low, log ? kSmallest : -kLargest, kLargest);
  high = std::clamp(high, low, kLargest);
  if (log) {
    // Ends at whole decades, or at 3 of a decade when that is enough.
    const double floor = std::pow(10.0, std::floor(std::log10(low)));
    const double top = std::pow(10.0, std::ceil(std::log10(high)));
    low = low >= 3 * floor ? 3 * floor : floor;
    high = high <= 0.3 * top ? 0.3 * top : top;
    if (high < 10 * low) low = high / 10;
    return {std::move(title), low, high, true, {}};
  }
  if (high - low <= std::numeric_limits<double>::epsilon() * std::abs(low)) {
    high = low + std::max(1.0, 1e-9 * std::abs(low));
  }
  return {std::move(title), low, high, false, {}};
}

std::string coordinate(double x) {
  std::string text = fmt::format("{:.1f}", x);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text == "-0" ? "0" : text;
}

std::string svg_begin(const std::string& id, const std::string& title,
                      const std::string& description, double width, double height, double widest) {
  const std::string style =
      widest > 0 ? fmt::format(" style=\"max-width:{}px\"", coordinate(widest)) : "";
  return fmt::format(
      "<svg viewBox=\"0 0 {} {}\"{style} role=\"img\" aria-labelledby=\"{id}-t {id}-d\">"
      "<title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>\n",
      coordinate(width), coordinate(height), escape_html(title), escape_html(description),
      fmt::arg("style", style), fmt::arg("id", id));
}

std::string svg_text(double x, double y, const char* css, const std::string& text) {
  return fmt::format("<text x=\"{}\" y=\"{}\" class=\"{}\">{}</text>\n", coordinate(x),
                     coordinate(y), css, escape_html(text));
}

std::string svg_line(double x1, double y1, double x2, double y2, const std::string& css) {
  return fmt::format("<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" class=\"{}\"/>\n",
                     coordinate(x1), coordinate(y1), coordinate(x2), coordinate(y2), css);
}

// Markup of both kinds of chart with two axes.

namespace {

constexpr double kLabelStep = 14;  // between the baselines of two labels

}  // namespace

std::string chart_marker(int style, double x, double y) {
  constexpr double r = 3.2;
  const std::string css = fmt::format("m s{}", style);
  switch (style % 4) {
    case 1:
      return fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" class=\"{}\"/>",
                         coordinate(x - r), coordinate(y - r), 2 * r, 2 * r, css);
    case 2:
      return fmt::format("<path d=\"M{} {}l{} {}h{}z\" class=\"{}\"/>", coordinate(x),
                         coordinate(y - 1.2 * r), 1.2 * r, 2.1 * r, -2.4 * r, css);
    case 3:
      return fmt::format("<path d=\"M{} {}l{r} {r}l-{r} {r}l-{r} -{r}z\" class=\"{}\"/>",
                         coordinate(x), coordinate(y - 1.2 * r), css, fmt::arg("r", 1.2 * r));
    default:
      return fmt::format("<circle cx=\"{}\" cy=\"{}\" r=\"{}\" class=\"{}\"/>", coordinate(x),
                         coordinate(y), r, css);
  }
}

std::string chart_frame(const AxisSpec& x_axis, const AxisSpec& y_axis, const Scale& x,
                        const Scale& y, const std::vector<std::pair<double, std::string>>& levels) {
  std::string svg;
  for (const Tick& tick : ticks_of(y_axis)) {
    svg += svg_line(x.from, y(tick.value), x.to, y(tick.value), "grid");
    svg += svg_text(x.from - 6, y(tick.value) + 4, "tick end", tick.label);
  }
  for (const Tick& tick : ticks_of(x_axis)) {
    svg += svg_line(x(tick.value), y.from, x(tick.value), y.from + 4, "axis");
    svg += svg_text(x(tick.value), y.from + 17, "tick mid", tick.label);
  }
  svg += svg_line(x.from, y.from, x.to, y.from, "axis");
  svg += svg_text(0, 12, "axis-title", y_axis.title);
  svg += svg_text(x.to, kChartHeight - 4, "axis-title end", x_axis.title);
  for (const auto& [value, name] : levels) {
    svg += svg_line(x.from, y(value), x.to, y(value), "level");
    if (!name.empty()) svg += svg_text(x.from + 4, y(value) - 4, "tick", name);
  }
  return svg;
}

void spread_labels(std::vector<ChartLabel>& labels) {
  std::ranges::stable_sort(labels, {}, &ChartLabel::y);
  for (size_t i = 0; i < labels.size(); ++i) {
    labels[i].y = std::max(labels[i].y, i == 0 ? kChartTop + 4 : labels[i - 1].y + kLabelStep);
  }
  double limit = kChartHeight - kChartBottom - 4;  // clear of the axis
  for (size_t i = labels.size(); i > 0; --i) {
    labels[i - 1].y = std::min(labels[i - 1].y, limit);
    limit = labels[i - 1].y - kLabelStep;
  }
}

// Lines over a common axis, each with its name beside its end.

namespace {

constexpr double kLinesLabelRoom = 126;  // on the right
constexpr size_t kMostMarkers = 24;      // of one line; more would hide it

// What a series leaves on the chart, in its coordinates.
struct Drawn {
  std::string line, dots, markers;
  size_t points = 0;
  double last = 0;  // height of the last point
};

Drawn trace(const Series& series, const Scale& x, const Scale& y) {
  Drawn drawn;
  bool gap = true;
  for (const auto& [px, py] : series.points) {
    if (!std::isfinite(px) || !std::isfinite(py)) {
      gap = true;
      continue;
    }
    const std::string place = coordinate(x(px)) + " " + coordinate(y(py));
    drawn.line += (gap ? "M" : "L") + place;
    drawn.dots += "M" + place + "h0";
    drawn.markers += chart_marker(series.style, x(px), y(py));
    drawn.last = y(py);
    gap = false;
    ++drawn.points;
  }
  return drawn;
}

std::string markup(const Series& series, const Drawn& drawn) {
  if (series.mark == SeriesMark::kDots) {
    return fmt::format("<path d=\"{}\" class=\"dots s{}\"/>\n", drawn.dots, series.style);
  }
  const bool thin = series.mark == SeriesMark::kThinLine;
  const std::string css = series.css.empty() ? fmt::format("s{}", series.style) : series.css;
  std::string svg =
      fmt::format("<path d=\"{}\" class=\"line {}{}\"/>\n", drawn.line, css, thin ? " thin" : "");
  const bool alone = drawn.points == 1;  // a line of one point is only visible as a marker
  const bool few = series.mark == SeriesMark::kMarkedLine && drawn.points <= kMostMarkers;
  if (alone || few) svg += "<g>" + drawn.markers + "</g>\n";
  return svg;
}

}  // namespace

std::string draw(const LineChart& chart) {
  const bool labelled =
      std::ranges::any_of(chart.series, [](const Series& s) { return !s.name.empty(); });
  const double right = kChartWidth - (labelled ? kLinesLabelRoom : kChartRight);
  const Scale x = make_scale(chart.x, kChartLeft, right);
  const Scale y = make_scale(chart.y, kChartHeight - kChartBottom, kChartTop);
  std::string svg = svg_begin(chart.id, chart.title, chart.description, kChartWidth, kChartHeight);
  svg += chart_frame(chart.x, chart.y, x, y, chart.levels);
  std::vector<ChartLabel> labels;
  for (size_t i = 0; i < chart.series.size(); ++i) {
    const Series& series = chart.series[i];
    const Drawn drawn = trace(series, x, y);
    if (drawn.points == 0) continue;
    svg += markup(series, drawn);
    if (!series.name.empty()) labels.push_back({drawn.last + 4, i});
  }
  spread_labels(labels);
  for (const ChartLabel& label : labels) {
    const Series& series = chart.series[label.index];
    svg += chart_marker(series.style, right + 11, label.y - 4);
    svg += svg_text(right + 19, label.y, fmt::format("label t{}", series.style).c_str(),
                    shortened(series.name, kLabelCharacters));
  }
  return svg + "</svg>\n";
}

// One row per method: a dot with its interval on a common axis.

namespace {

constexpr double kIntervalsWidth = 400, kIntervalsLeft = 124, kIntervalsRight = 64,
                 kIntervalsTop = 20, kIntervalsBottom = 40;
constexpr double kRow = 27;

}  // namespace

std::string draw(const IntervalChart& chart) {
  const double bottom = kIntervalsTop + kRow * static_cast<double>(chart.rows.size());
  const double height = bottom + kIntervalsBottom;
  const Scale x = make_scale(chart.x, kIntervalsLeft, kIntervalsWidth - kIntervalsRight);
  std::string svg = svg_begin(chart.id, chart.title, chart.description, kIntervalsWidth, height);
  for (const Tick& tick : ticks_of(chart.x, 4)) {
    svg += svg_line(x(tick.value), kIntervalsTop, x(tick.value), bottom, "grid");
    svg += svg_text(x(tick.value), bottom + 17, "tick mid", tick.label);
  }
  for (const auto& [value, name] : chart.levels) {
    svg += svg_line(x(value), kIntervalsTop - 4, x(value), bottom, "level");
    svg += svg_text(x(value) + 3, kIntervalsTop - 6, "tick", name);
  }
  svg += svg_line(x.from, bottom, x.to, bottom, "axis");
  svg += svg_text(x.to, height - 4, "axis-title end", chart.x.title);
  double y = kIntervalsTop + kRow / 2;
  for (const IntervalRow& row : chart.rows) {
    const std::string css = fmt::format("s{}", row.style);
    svg += fmt::format("<g><title>{}: {}</title>\n", escape_html(row.name), escape_html(row.value));
    svg += svg_text(kIntervalsLeft - 10, y + 4, fmt::format("label end t{}", row.style).c_str(),
                    shortened(row.name, kLabelCharacters));
    if (std::isfinite(row.mean)) {
      if (row.high > row.low) {
        svg += svg_line(x(row.low), y, x(row.high), y, "interval " + css);
        svg += svg_line(x(row.low), y - 5, x(row.low), y + 5, "interval " + css);
        svg += svg_line(x(row.high), y - 5, x(row.high), y + 5, "interval " + css);
      }
      svg += fmt::format("<circle cx=\"{}\" cy=\"{}\" r=\"4.5\" class=\"m {}\"/>\n",
                         coordinate(x(row.mean)), coordinate(y), css);
    }
    svg += svg_text(kIntervalsWidth - kIntervalsRight + 8, y + 4, "value", row.value) + "</g>\n";
    y += kRow;
  }
  return svg + "</svg>\n";
}

// Points with their names beside them.

namespace {

constexpr double kPointLabelGap = 14;
constexpr double kColumnWidth = 60;  // of points that share a column of labels

struct Column {
  std::vector<size_t> points;  // indices, from left to right
  double first = 0, last = 0;  // places of the outer ones
};

std::vector<Column> columns_of(const ScatterChart& chart, const Scale& x) {
  std::vector<size_t> order(chart.points.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) { return chart.points[i].x; });
  std::vector<Column> columns;
  for (const size_t i : order) {
    const double place = x(chart.points[i].x);
    if (columns.empty() || place - columns.back().first > kColumnWidth) {
      columns.push_back({.points = {}, .first = place, .last = place});
    }
    columns.back().points.push_back(i);
    columns.back().last = place;
  }
  return columns;
}

// The names of a column on its right or left, each with a line to its point.
std::string labels_of(const ScatterChart& chart, const Column& column, bool right, const Scale& x,
                      const Scale& y) {
  std::vector<ChartLabel> labels;
  for (const size_t i : column.points) {
    if (!chart.points[i].name.empty()) labels.push_back({y(chart.points[i].y) + 4, i});
  }
  spread_labels(labels);
  const double at = right ? column.last + kPointLabelGap : column.first - kPointLabelGap;
  std::string svg;
  for (const ChartLabel& label : labels) {
    const ScatterPoint& point = chart.points[label.index];
    svg += svg_line(x(point.x), y(point.y), right ? at - 2 : at + 2, label.y - 4, "leader");
    svg +=
        svg_text(at, label.y, fmt::format("label t{}{}", point.style, right ? "" : " end").c_str(),
                 shortened(point.name, kLabelCharacters));
  }
  return svg;
}

// Each column's names stand where the neighbour is further away.
std::string all_labels(const ScatterChart& chart, const Scale& x, const Scale& y) {
  const std::vector<Column> columns = columns_of(chart, x);
  std::string svg;
  for (size_t c = 0; c < columns.size(); ++c) {
    const double before = c == 0 ? x.from : columns[c - 1].last;
    const double behind = c + 1 == columns.size() ? x.to + kChartRight : columns[c + 1].first;
    const bool right = behind - columns[c].last >= columns[c].first - before;
    svg += labels_of(chart, columns[c], right, x, y);
  }
  return svg;
}

}  // namespace

std::string draw(const ScatterChart& chart) {
  const Scale x = make_scale(chart.x, kChartLeft, kChartWidth - kChartRight);
  const Scale y = make_scale(chart.y, kChartHeight - kChartBottom, kChartTop);
  std::string svg = svg_begin(chart.id, chart.title, chart.description, kChartWidth, kChartHeight);
  svg += chart_frame(chart.x, chart.y, x, y, {});
  svg += all_labels(chart, x, y);
  for (const ScatterPoint& point : chart.points) {
    svg += fmt::format("<g><title>{}</title>{}</g>\n", escape_html(point.name),
                       chart_marker(point.style, x(point.x), y(point.y)));
  }
  return svg + "</svg>\n";
}

// A grid of shares: the shade and, where there is room, the number in each cell say the same.

namespace {

constexpr double kCellsLeft = 40, kCellsTop = 20, kCellsBottom = 34, kWidest = 400;
constexpr double kCellWidth = 46, kCellHeight = 24;  // of cells with numbers
constexpr double kNarrowHeight = 11;                 // of cells without
constexpr double kDigit = 7, kCellLabelRoom = 8;
constexpr double kTickWidth = 24, kTickHeight = 13;
constexpr double kStretched = 1.2;
constexpr int kShades = 7;  // classes h0 .. h6

// 0 also of a value that is no number.
int shade(double value) {
  return value > 0 ? static_cast<int>(std::min(value * kShades, kShades - 1.0)) : 0;
}

double cell_width(size_t columns) {
  return std::min(kCellWidth,
                  (kWidest - kCellsLeft) / static_cast<double>(std::max<size_t>(columns, 1)));
}

struct Grid {
  double width = 0, height = 0, gap = 0;  // of a cell; the gap is inside

  double left(size_t column) const { return kCellsLeft + width * static_cast<double>(column); }
  double top(size_t row) const { return kCellsTop + height * static_cast<double>(row); }
};

std::string map_ticks(const HeatMap& map, const Grid& grid, double bottom) {
  std::string svg;
  const auto rows = static_cast<size_t>(std::ceil(kTickHeight / grid.height));
  for (size_t r = 0; r < map.rows.size(); r += rows) {
    svg += svg_text(kCellsLeft - 6, grid.top(r) + grid.height / 2 + 4, "tick end", map.rows[r]);
  }
  const auto columns = static_cast<size_t>(std::ceil(kTickWidth / grid.width));
  for (size_t c = 0; c < map.columns.size(); c += columns) {
    svg += svg_text(grid.left(c) + grid.width / 2, bottom + 14, "tick mid", map.columns[c]);
  }
  return svg;
}

std::string numbered_cells(const HeatMap& map, const Grid& grid) {
  std::string svg;
  for (const HeatCell& cell : map.cells) {
    const double x = grid.left(cell.column), y = grid.top(cell.row);
    svg += fmt::format(
        "<g class=\"h{}\"><title>{}</title><rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
        shade(cell.value), escape_html(cell.tooltip), coordinate(x), coordinate(y),
        coordinate(grid.width - grid.gap), coordinate(grid.height - grid.gap));
    svg += svg_text(x + (grid.width - grid.gap) / 2, y + 15, "mid", cell.label) + "</g>\n";
  }
  return svg;
}

// One path for each shade, so that thousands of cells stay small.
std::string plain_cells(const HeatMap& map, const Grid& grid) {
  std::array<std::string, kShades> paths;
  for (const HeatCell& cell : map.cells) {
    paths[static_cast<size_t>(shade(cell.value))] += fmt::format(
        "M{} {}h{w}v{}h-{w}z", coordinate(grid.left(cell.column)), coordinate(grid.top(cell.row)),
        coordinate(grid.height - grid.gap), fmt::arg("w", coordinate(grid.width - grid.gap)));
  }
  std::string svg;
  for (size_t i = 0; i < paths.size(); ++i) {
    if (!paths[i].empty()) svg += fmt::format("<path class=\"h{}\" d=\"{}\"/>\n", i, paths[i]);
  }
  return svg;
}

}  // namespace

double heat_map_width(size_t columns) {
  constexpr double kFewest = 3;  // room for the axis title
  return kCellsLeft +
         std::max(kCellWidth * kFewest, cell_width(columns) * static_cast<double>(columns));
}

std::string draw(const HeatMap& map) {
  const double width = heat_map_width(map.columns.size());
  size_t longest = 0;
  for (const HeatCell& cell : map.cells) longest = std::max(longest, cell.label.size());
  Grid grid{.width = cell_width(map.columns.size()), .height = kCellHeight, .gap = 2};
  const bool numbered = grid.width >= kCellLabelRoom + kDigit * static_cast<double>(longest);
  if (!numbered) grid.height = kNarrowHeight;
  if (!numbered) grid.gap = 0.5;
  const double bottom = grid.top(map.rows.size());
  std::string svg = svg_begin(map.id, map.title, map.description, width, bottom + kCellsBottom,
                              kStretched * width);
  svg += svg_text(0, 12, "axis-title", map.row_title) + map_ticks(map, grid, bottom);
  svg += svg_text(kCellsLeft, bottom + 29, "axis-title", map.column_title);
  return svg + (numbered ? numbered_cells(map, grid) : plain_cells(map, grid)) + "</svg>\n";
}

}  // namespace oscar
