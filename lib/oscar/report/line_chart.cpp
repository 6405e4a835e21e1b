// Lines over a common axis, each with its name beside its end.
#include <fmt/format.h>

#include <algorithm>

#include "oscar/report/chart_parts.h"
#include "oscar/report/html.h"

namespace oscar {
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

}  // namespace oscar
