// From values to places on an axis, and the ticks between its ends.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "oscar/report/chart.h"

namespace oscar {

// Linear or logarithmic map of [axis.low, axis.high] onto [from, to]; values outside are held at
// the ends.
struct Scale {
  double low = 0, high = 1, from = 0, to = 1;
  bool log = false;

  double operator()(double value) const;
};

Scale make_scale(const AxisSpec& axis, double from, double to);

// The axis's own ticks, or chosen ones: decades when log, about `wanted` round steps otherwise.
std::vector<Tick> ticks_of(const AxisSpec& axis, int wanted = 5);

// How much of a name fits beside a chart.
inline constexpr size_t kLabelCharacters = 16;

// Coordinates with one decimal, without a needless ".0".
std::string coordinate(double x);

// Parts of an SVG. Texts are escaped here.
// Shown as wide as there is room, or as `widest` pixels.
std::string svg_begin(const std::string& id, const std::string& title,
                      const std::string& description, double width, double height,
                      double widest = 0);
std::string svg_text(double x, double y, const char* css, const std::string& text);
std::string svg_line(double x1, double y1, double x2, double y2, const std::string& css);

}  // namespace oscar
