// Points with their names beside them.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "oscar/report/chart_parts.h"
#include "oscar/report/html.h"

namespace oscar {
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

}  // namespace oscar
