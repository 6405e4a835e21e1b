// Lines over a common axis, each with its name beside its end.
#include <fmt/format.h>

#include <algorithm>

#include "oscar/report/html.h"
#include "oscar/report/scale.h"

namespace oscar {
namespace {

constexpr double kLinesWidth = 400, kLinesHeight = 270;
constexpr double kLinesLeft = 44, kLinesTop = 26, kLinesBottom = 40, kLinesPlainRight = 10,
                 kLinesLabelRight = 126;
constexpr double kLabelStep = 14;    // between the baselines of two labels
constexpr size_t kMostMarkers = 24;  // of one line; more would hide it

std::string marker(int style, double x, double y) {
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

struct Label {
  double y = 0;
  const Series* series = nullptr;
};

// Moves labels apart without leaving [top, bottom], keeping their order.
void spread(std::vector<Label>& labels, double top, double bottom) {
  std::stable_sort(labels.begin(), labels.end(),
                   [](const Label& a, const Label& b) { return a.y < b.y; });
  for (size_t i = 0; i < labels.size(); ++i) {
    labels[i].y = std::max(labels[i].y, i == 0 ? top : labels[i - 1].y + kLabelStep);
  }
  double limit = bottom;
  for (size_t i = labels.size(); i > 0; --i) {
    labels[i - 1].y = std::min(labels[i - 1].y, limit);
    limit = labels[i - 1].y - kLabelStep;
  }
}

std::string frame(const LineChart& chart, const Scale& x, const Scale& y) {
  std::string svg;
  for (const Tick& tick : ticks_of(chart.y)) {
    svg += svg_line(x.from, y(tick.value), x.to, y(tick.value), "grid");
    svg += svg_text(x.from - 6, y(tick.value) + 4, "tick end", tick.label);
  }
  for (const Tick& tick : ticks_of(chart.x)) {
    svg += svg_line(x(tick.value), y.from, x(tick.value), y.from + 4, "axis");
    svg += svg_text(x(tick.value), y.from + 17, "tick mid", tick.label);
  }
  svg += svg_line(x.from, y.from, x.to, y.from, "axis");
  svg += svg_text(0, 12, "axis-title", chart.y.title);
  svg += svg_text(x.to, kLinesHeight - 4, "axis-title end", chart.x.title);
  for (const auto& [value, name] : chart.levels) {
    svg += svg_line(x.from, y(value), x.to, y(value), "level");
    svg += svg_text(x.from + 4, y(value) - 4, "tick", name);
  }
  return svg;
}

}  // namespace

std::string draw(const LineChart& chart) {
  const bool labelled =
      std::ranges::any_of(chart.series, [](const Series& s) { return !s.name.empty(); });
  const double right = labelled ? kLinesLabelRight : kLinesPlainRight;
  const Scale x = make_scale(chart.x, kLinesLeft, kLinesWidth - right);
  const Scale y = make_scale(chart.y, kLinesHeight - kLinesBottom, kLinesTop);
  std::string svg = svg_begin(chart.id, chart.title, chart.description, kLinesWidth, kLinesHeight);
  svg += frame(chart, x, y);
  std::vector<Label> labels;
  for (const Series& series : chart.series) {
    std::string line, markers;
    size_t drawn = 0;
    double last = 0;
    bool gap = true;
    for (const auto& [px, py] : series.points) {
      if (!std::isfinite(px) || !std::isfinite(py)) {
        gap = true;
        continue;
      }
      line += fmt::format("{}{} {}", gap ? "M" : "L", coordinate(x(px)), coordinate(y(py)));
      markers += marker(series.style, x(px), y(py));
      last = y(py);
      gap = false;
      ++drawn;
    }
    if (drawn == 0) continue;
    const std::string css = series.css.empty() ? fmt::format("s{}", series.style) : series.css;
    svg += fmt::format("<path d=\"{}\" class=\"line {}\"/>\n", line, css);
    const bool alone = drawn == 1;  // a line of one point is only visible as a marker
    if (alone || (series.markers && drawn <= kMostMarkers)) svg += "<g>" + markers + "</g>\n";
    if (!series.name.empty()) labels.push_back({last + 4, &series});
  }
  spread(labels, kLinesTop + 4, kLinesHeight - kLinesBottom);
  for (const Label& label : labels) {
    const double at = kLinesWidth - right + 8;
    svg += marker(label.series->style, at + 3, label.y - 4);
    svg += svg_text(at + 11, label.y, fmt::format("label t{}", label.series->style).c_str(),
                    shortened(label.series->name, kLabelCharacters));
  }
  return svg + "</svg>\n";
}

}  // namespace oscar
