// A grid of shares: the shade and, where there is room, the number in each cell say the same.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "oscar/report/html.h"
#include "oscar/report/scale.h"

namespace oscar {
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
