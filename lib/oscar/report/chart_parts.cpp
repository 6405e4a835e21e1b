// Markup of both kinds of chart with two axes.
#include "oscar/report/chart_parts.h"

#include <fmt/format.h>

#include <algorithm>

namespace oscar {
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

}  // namespace oscar
