// Text and numbers: printed and parsed.
#include "oscar/base/strings.h"

#include <fmt/format.h>
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numeric>
#include <utility>

namespace oscar {

// Rounding, grouping of thousands, and powers of ten in print.

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

namespace {

// A percentage of thousands says little.
bool is_times(const Figure& x) { return is_finite(x) && *x >= 10; }

std::string signed_percent_in(const Figure& x, bool times) {
  return guarded(x, [times](double value) {
    const double points = 100 * value;
    if (times) return figure(value + 1) + "×";
    return (points > 0 ? "+" : "") + fixed(points, std::abs(points) < 100 ? 1 : 0) + "%";
  });
}

}  // namespace

std::string signed_percent(const Figure& x) { return signed_percent_in(x, is_times(x)); }

std::string signed_percent(const Figure& mean, const Figure& low, const Figure& high) {
  if (!is_finite(low) || !is_finite(high)) return signed_percent(mean);
  const bool times = is_times(mean) || is_times(high);
  return fmt::format("{} [{}, {}]", signed_percent_in(mean, times), signed_percent_in(low, times),
                     signed_percent_in(high, times));
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

// Digits to the last one; with a unit or an exponent, as far as a double tells whole numbers.

std::optional<int64_t> parse_count(const std::string& text) {
  if (text.find_first_not_of("0123456789.eE+kKmMgG-") != std::string::npos) return std::nullopt;
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str()) return std::nullopt;
  const std::string unit = end;
  const size_t power = std::string("kmg").find(unit.empty() ? '?' : std::tolower(unit[0]));
  if (unit.size() > 1 || (!unit.empty() && power == std::string::npos)) return std::nullopt;
  const bool digits = text.find_first_not_of("-0123456789") == std::string::npos;
  if (digits) {  // to the last one
    errno = 0;
    const long long whole = std::strtoll(text.c_str(), &end, 10);
    return errno == 0 ? std::optional<int64_t>(whole) : std::nullopt;
  }
  const double number = unit.empty() ? value : std::ldexp(value, 10 * static_cast<int>(power + 1));
  constexpr double kMost = 9e18;
  if (!(std::abs(number) <= kMost) || number != std::floor(number)) return std::nullopt;
  return static_cast<int64_t>(number);
}

// Distances between words.

namespace {

// Letters to insert, drop, change or swap with their neighbour.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> older(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({change, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], older[j - 2] + 1);
      }
    }
    older = std::exchange(last, row);
  }
  return last[b.size()];
}

}  // namespace

std::string nearest_word(const std::string& word, const std::vector<std::string>& known) {
  constexpr size_t kLongest = 64;  // no name is as long
  if (word.size() > kLongest) return "";
  std::string nearest;
  size_t best = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& name : known) {
    const size_t letters = word.size() > 3 && name.starts_with(word) ? 1 : distance(word, name);
    if (letters >= best) continue;
    best = letters;
    nearest = name;
  }
  return nearest;
}

// Joining remarks, and wrapping at blanks.

namespace {

// Remarks about layers that are alike but for numbers.
struct Alike {
  std::string words = {};        // of the first one, behind "layer N"
  std::vector<int> layers = {};  // each once, as they came
  int count = 0;
  bool same = true;  // all of them say `words`
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::string without_numbers(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (!is_digit(c)) {
      out += c;
    } else if (out.empty() || out.back() != '#') {
      out += '#';
    }
  }
  return out;
}

// "0 to 3, 7".
std::string ranges(std::vector<int> layers) {
  std::sort(layers.begin(), layers.end());
  std::string text;
  for (size_t i = 0; i < layers.size();) {
    size_t end = i;
    while (end + 1 < layers.size() && layers[end + 1] == layers[end] + 1) ++end;
    if (!text.empty()) text += ", ";
    text += std::to_string(layers[i]);
    if (end > i) text += fmt::format(" to {}", layers[end]);
    i = end + 1;
  }
  return text;
}

std::string joined(const Alike& group) {
  if (group.layers.size() == 1 && group.count == 1) {
    return fmt::format("layer {}{}", group.layers[0], group.words);
  }
  const std::string layers =
      fmt::format("layer{} {}", group.layers.size() == 1 ? "" : "s", ranges(group.layers));
  if (group.same) return layers + group.words;
  return fmt::format("{}, {} times, for example layer {}{}", layers, group.count, group.layers[0],
                     group.words);
}

}  // namespace

std::vector<std::string> joined_by_layer(const std::vector<std::string>& remarks) {
  constexpr std::string_view kLayer = "layer ";
  constexpr size_t kMostDigits = 6;
  std::vector<std::string> out;
  std::vector<std::pair<size_t, Alike>> groups;  // place in `out`
  std::map<std::string, size_t> by_words;
  for (const std::string& remark : remarks) {
    size_t end = kLayer.size();
    while (end < remark.size() && is_digit(remark[end])) ++end;
    const size_t digits = end - kLayer.size();
    if (!remark.starts_with(kLayer) || digits == 0 || digits > kMostDigits) {
      out.push_back(remark);
      continue;
    }
    const int layer = std::stoi(remark.substr(kLayer.size(), digits));
    const std::string words = remark.substr(end);
    const auto [place, is_new] = by_words.emplace(without_numbers(words), groups.size());
    if (is_new) {
      groups.push_back({out.size(), {.words = words, .layers = {}}});
      out.emplace_back();
    }
    Alike& group = groups[place->second].second;
    ++group.count;
    group.same = group.same && group.words == words;
    if (std::find(group.layers.begin(), group.layers.end(), layer) == group.layers.end()) {
      group.layers.push_back(layer);
    }
  }
  for (const auto& [place, group] : groups) out[place] = joined(group);
  return out;
}

void add_line(std::string& text, const std::string& label, const std::string& words,
              size_t indent) {
  constexpr size_t kColumns = 80;
  std::string line = fmt::format("{:<{}}", label, indent);
  for (size_t begin = 0; begin < words.size();) {
    size_t end = words.find(' ', begin);
    if (end == std::string::npos) end = words.size();
    const size_t length = end - begin;
    if (line.size() > indent && line.size() + 1 + length > kColumns) {
      text += line + "\n";
      line = std::string(indent, ' ');
    }
    if (line.size() > indent) line += ' ';
    line += words.substr(begin, length);
    begin = end + 1;
  }
  text += line + "\n";
}

}  // namespace oscar
