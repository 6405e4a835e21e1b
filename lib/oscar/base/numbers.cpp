// Rounding, grouping of thousands, and powers of ten in print.
#include "oscar/base/numbers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace oscar {
namespace {

constexpr const char* kAbsent = "–";
constexpr const char* kNotFinite = "not finite";
constexpr double kPlainFrom = 1e-3, kPlainTo = 1e7;  // outside of these with a power of ten

std::string superscript(int exponent) {
  static const char* const digits[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string out;
  for (const char c : std::to_string(exponent)) out += c == '-' ? "⁻" : digits[c - '0'];
  return out;
}

// Fixed decimals with commas between thousands and a true minus sign.
std::string fixed(double x, int decimals) {
  std::string text = fmt::format("{:.{}f}", std::abs(x), decimals);
  const size_t point = std::min(text.find('.'), text.size());
  for (size_t i = point; i > 3; i -= 3) text.insert(i - 3, ",");
  const bool zero = text.find_first_not_of("0.,") == std::string::npos;
  return (x < 0 && !zero ? "−" : "") + text;
}

int exponent_of(double x) {
  return x == 0 ? 0 : static_cast<int>(std::floor(std::log10(std::abs(x))));
}

// Writes through `text` unless there is nothing to write.
template <typename Write>
std::string guarded(const Figure& x, Write text) {
  if (!x) return kAbsent;
  return std::isfinite(*x) ? text(*x) : kNotFinite;
}

}  // namespace

bool is_finite(const Figure& x) { return x && std::isfinite(*x); }

std::string figure(const Figure& x, int digits) {
  return guarded(x, [&](double value) {
    if (value == 0) return std::string("0");
    if (std::abs(value) < kPlainFrom || std::abs(value) >= kPlainTo) {
      const std::string text = fmt::format("{:.{}e}", value, std::max(0, digits - 2));
      const size_t e = text.find('e');
      std::string mantissa = text.substr(0, e);
      if (mantissa[0] == '-') mantissa = "−" + mantissa.substr(1);
      if (mantissa == "1") return "10" + superscript(std::stoi(text.substr(e + 1)));
      return mantissa + "×10" + superscript(std::stoi(text.substr(e + 1)));
    }
    return fixed(value, std::max(0, digits - 1 - exponent_of(value)));
  });
}

std::string percent(const Figure& x, int decimals) {
  return guarded(x, [&](double value) { return fixed(100 * value, decimals) + "%"; });
}

std::string signed_percent(const Figure& x) {
  return guarded(x, [](double value) {
    const double points = 100 * value;
    if (value >= 10) return figure(value + 1) + "×";  // a percentage of thousands says little
    return (points > 0 ? "+" : "") + fixed(points, std::abs(points) < 100 ? 1 : 0) + "%";
  });
}

std::string count(const Figure& x) {
  return guarded(x, [](double value) { return fixed(value, 0); });
}

std::string token_length(const Figure& x) {
  return guarded(x, [](double value) {
    const bool round = value >= 1024 && std::fmod(value, 1024) == 0;
    return round ? fixed(value / 1024, 0) + "K" : fixed(value, 0);
  });
}

std::string times(const Figure& x) {
  return guarded(x, [](double value) {
    return figure(value, value < 10 ? 2 : value < 100 ? 2 : 3) + " times";
  });
}

std::string ordinal(int64_t n) {
  const bool teens = n / 10 % 10 == 1;
  const char* ends[] = {"th", "st", "nd", "rd"};
  return std::to_string(n) + (teens || n % 10 > 3 ? "th" : ends[n % 10]);
}

std::string with_interval(const Figure& mean, const Figure& low, const Figure& high) {
  if (!is_finite(mean) || !is_finite(low) || !is_finite(high)) return figure(mean);
  const double half = std::max(*high - *mean, *mean - *low);
  const double size = std::max({std::abs(*mean), std::abs(*low), std::abs(*high)});
  if (!(half > 0) || size < kPlainFrom || size >= kPlainTo) {
    return fmt::format("{} [{}, {}]", figure(mean), figure(low), figure(high));
  }
  // Two digits of the half width, one when it is wide, and never fewer than three of the mean.
  const int decimals = std::clamp(std::max(1 - exponent_of(half), 2 - exponent_of(*mean)), 0, 5);
  const int used = exponent_of(half) >= 0 ? std::min(decimals, 2) : decimals;
  return fmt::format("{} [{}, {}]", fixed(*mean, used), fixed(*low, used), fixed(*high, used));
}

}  // namespace oscar
