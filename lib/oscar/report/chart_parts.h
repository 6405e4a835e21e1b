// What charts with two axes share: their place, markers, and labels that keep apart.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "oscar/report/chart.h"
#include "oscar/report/scale.h"

namespace oscar {

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

}  // namespace oscar
