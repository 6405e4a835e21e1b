// A grid of shares: the shade and the number in each cell say the same.
#include <fmt/format.h>

#include <algorithm>

#include "oscar/report/html.h"
#include "oscar/report/scale.h"

namespace oscar {
namespace {

constexpr double kCellsLeft = 40, kCellsTop = 20, kCellsBottom = 34, kCellWidth = 46,
                 kCellHeight = 24, kCellsGap = 2;
constexpr int kShades = 7;  // classes h0 .. h6

int shade(double value) { return std::clamp(static_cast<int>(value * kShades), 0, kShades - 1); }

}  // namespace

double heat_map_width(size_t columns) {
  constexpr size_t kFewest = 3;  // room for the axis title
  return kCellsLeft + kCellWidth * static_cast<double>(std::max(columns, kFewest));
}

std::string draw(const HeatMap& map) {
  const double width = heat_map_width(map.columns.size());
  const double bottom = kCellsTop + kCellHeight * static_cast<double>(map.rows.size());
  std::string svg = svg_begin(map.id, map.title, map.description, width, bottom + kCellsBottom);
  svg += svg_text(0, 12, "axis-title", map.row_title);
  for (size_t r = 0; r < map.rows.size(); ++r) {
    svg += svg_text(kCellsLeft - 6, kCellsTop + kCellHeight * (static_cast<double>(r) + 0.5) + 4,
                    "tick end", map.rows[r]);
  }
  for (size_t c = 0; c < map.columns.size(); ++c) {
    svg += svg_text(kCellsLeft + kCellWidth * (static_cast<double>(c) + 0.5), bottom + 14,
                    "tick mid", map.columns[c]);
  }
  svg += svg_text(kCellsLeft, bottom + 29, "axis-title", map.column_title);
  for (const HeatCell& cell : map.cells) {
    const double x = kCellsLeft + kCellWidth * static_cast<double>(cell.column);
    const double y = kCellsTop + kCellHeight * static_cast<double>(cell.row);
    svg += fmt::format(
        "<g class=\"h{}\"><title>{}</title><rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
        shade(cell.value), escape_html(cell.tooltip), coordinate(x), coordinate(y),
        kCellWidth - kCellsGap, kCellHeight - kCellsGap);
    svg += svg_text(x + (kCellWidth - kCellsGap) / 2, y + 15, "mid", cell.label) + "</g>\n";
  }
  return svg + "</svg>\n";
}

}  // namespace oscar
