// Axes and the small vocabulary of SVG that the charts share.
#include "oscar/report/scale.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "oscar/base/numbers.h"
#include "oscar/report/html.h"

namespace oscar {
namespace {

// Ends of axes: what lies beyond is drawn at them. Far enough from the limits of a double that
// steps, decades and differences are ordinary numbers.
constexpr double kSmallest = 1e-290, kLargest = 1e290;
constexpr int kMostTicks = 50;

}  // namespace

double Scale::operator()(double value) const {
  const double held = std::clamp(value, low, high);
  const double part = log ? (std::log(held) - std::log(low)) / (std::log(high) - std::log(low))
                          : (held - low) / (high - low);
  return from + part * (to - from);
}

Scale make_scale(const AxisSpec& axis, double from, double to) {
  return {axis.low, axis.high, from, to, axis.log};
}

std::vector<Tick> ticks_of(const AxisSpec& axis, int wanted) {
  if (!axis.ticks.empty()) return axis.ticks;
  std::vector<Tick> ticks;
  if (!(axis.low < axis.high) || (axis.log && !(axis.low > 0))) return ticks;
  if (axis.log) {
    const int first = static_cast<int>(std::ceil(std::log10(axis.low) - 1e-9));
    const int last = static_cast<int>(std::floor(std::log10(axis.high) + 1e-9));
    const int step = std::max(1, (last - first + wanted) / std::max(1, wanted));
    for (int e = first; e <= last; e += step) {
      const double value = std::pow(10.0, e);
      ticks.push_back({value, figure(value, 1)});
    }
    return ticks;
  }
  const double raw = (axis.high - axis.low) / wanted;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  double step = power * 10;
  for (const double factor : {5.0, 2.0, 1.0}) {
    if (power * factor >= raw) step = power * factor;
  }
  // Counted: a step may be too small to change a value.
  const double first = std::ceil(axis.low / step - 1e-9);
  for (int i = 0; i <= kMostTicks; ++i) {
    const double v = (first + i) * step;
    if (!(v <= axis.high + 1e-9 * step)) break;
    ticks.push_back({v, fmt::format("{:g}", std::abs(v) < 1e-9 * step ? 0 : v)});
  }
  return ticks;
}

AxisSpec axis_over(const std::vector<double>& values, bool log, std::string title) {
  double low = INFINITY, high = -INFINITY;
  for (const double v : values) {
    if (!std::isfinite(v) || (log && !(v > 0))) continue;
    low = std::min(low, v);
    high = std::max(high, v);
  }
  if (low > high) return {std::move(title), 0.1, 1, log, {}};
  low = std::clamp(low, log ? kSmallest : -kLargest, kLargest);
  high = std::clamp(high, low, kLargest);
  if (log) {
    // Ends at whole decades, or at 3 of a decade when that is enough.
    const double floor = std::pow(10.0, std::floor(std::log10(low)));
    const double top = std::pow(10.0, std::ceil(std::log10(high)));
    low = low >= 3 * floor ? 3 * floor : floor;
    high = high <= 0.3 * top ? 0.3 * top : top;
    if (high < 10 * low) low = high / 10;
    return {std::move(title), low, high, true, {}};
  }
  if (high - low <= std::numeric_limits<double>::epsilon() * std::abs(low)) {
    high = low + std::max(1.0, 1e-9 * std::abs(low));
  }
  return {std::move(title), low, high, false, {}};
}

std::string coordinate(double x) {
  std::string text = fmt::format("{:.1f}", x);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text == "-0" ? "0" : text;
}

std::string svg_begin(const std::string& id, const std::string& title,
                      const std::string& description, double width, double height, double widest) {
  const std::string style =
      widest > 0 ? fmt::format(" style=\"max-width:{}px\"", coordinate(widest)) : "";
  return fmt::format(
      "<svg viewBox=\"0 0 {} {}\"{style} role=\"img\" aria-labelledby=\"{id}-t {id}-d\">"
      "<title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>\n",
      coordinate(width), coordinate(height), escape_html(title), escape_html(description),
      fmt::arg("style", style), fmt::arg("id", id));
}

std::string svg_text(double x, double y, const char* css, const std::string& text) {
  return fmt::format("<text x=\"{}\" y=\"{}\" class=\"{}\">{}</text>\n", coordinate(x),
                     coordinate(y), css, escape_html(text));
}

std::string svg_line(double x1, double y1, double x2, double y2, const std::string& css) {
  return fmt::format("<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" class=\"{}\"/>\n",
                     coordinate(x1), coordinate(y1), coordinate(x2), coordinate(y2), css);
}

}  // namespace oscar
