// One row per method: a dot with its interval on a common axis.
#include <fmt/format.h>

#include <algorithm>

#include "oscar/report/html.h"
#include "oscar/report/scale.h"

namespace oscar {
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

}  // namespace oscar
