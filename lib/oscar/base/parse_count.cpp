// Digits to the last one; with a unit or an exponent, as far as a double tells whole numbers.
#include "oscar/base/parse_count.h"

#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdlib>

namespace oscar {

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

}  // namespace oscar
