// A grid of shares: the shade and the number in each cell say the same.
#include <fmt/format.h>

#include <algorithm>

#include "oscar/report/html.h"
#include "oscar/report/scale.h"

namespace oscar {
namespace {

constexpr double kLeft = 40, kTop = 20, kBottom = 34, kCellWidth = 46, kCellHeight = 24, kGap = 2;
constexpr int kShades = 7;  // classes h0 .. h6

int shade(double value) { return std::clamp(static_cast<int>(value * kShades), 0, kShades - 1); }

}  // namespace

double heat_map_width(size_t columns) {
  constexpr size_t kFewest = 3;  // room for the axis title
  return kLeft + kCellWidth * static_cast<double>(std::max(columns, kFewest));
}

std::string draw(const HeatMap& map) {
  const double width = heat_map_width(map.columns.size());
  const double bottom = kTop + kCellHeight * static_cast<double>(map.rows.size());
  std::string svg = svg_begin(map.id, map.title, map.description, width, bottom + kBottom);
  svg += svg_text(0, 12, "axis-title", map.row_title);
  for (size_t r = 0; r < map.rows.size(); ++r) {
    svg += svg_text(kLeft - 6, kTop + kCellHeight * (static_cast<double>(r) + 0.5) + 4, "tick end",
                    map.rows[r]);
  }
  for (size_t c = 0; c < map.columns.size(); ++c) {
    svg += svg_text(kLeft + kCellWidth * (static_cast<double>(c) + 0.5), bottom + 14, "tick mid",
                    map.columns[c]);
  }
  svg += svg_text(kLeft, bottom + 29, "axis-title", map.column_title);
  for (const HeatCell& cell : map.cells) {
    const double x = kLeft + kCellWidth * static_cast<double>(cell.column);
    const double y = kTop + kCellHeight * static_cast<double>(cell.row);
    svg += fmt::format(
        "<g class=\"h{}\"><title>{}</title><rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
        shade(cell.value), escape_html(cell.tooltip), coordinate(x), coordinate(y),
        kCellWidth - kGap, kCellHeight - kGap);
    svg += svg_text(x + (kCellWidth - kGap) / 2, y + 15, "mid", cell.label) + "</g>\n";
  }
  return svg + "</svg>\n";
}

}  // namespace oscar
