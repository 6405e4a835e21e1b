// Reading and refusing single values.
#include "oscar/checkpoint/config_reader.h"

#include <fmt/format.h>

#include "oscar/base/error.h"

namespace oscar {

void ConfigReader::refuse(const std::string& key, const std::string& what,
                          const std::string& expected) const {
  throw Error({.what = what,
               .where = source + ": " + key,
               .expected = expected,
               .found = json.contains(key) ? json[key].dump() : "nothing"});
}

std::optional<int> ConfigReader::size(const std::string& key, int64_t max, int64_t min) const {
  if (!has(key)) return std::nullopt;
  const Json& value = json[key];
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t(max)) &&
                    value.get<int64_t>() >= min && value.get<int64_t>() <= max;
  if (!fits) {
    refuse(key, "config.json has an impossible value", fmt::format("{} to {}", min, max));
  }
  return value.get<int>();
}

bool ConfigReader::flag(const std::string& key, bool fallback) const {
  if (!has(key)) return fallback;
  if (!json[key].is_boolean()) refuse(key, "not a boolean", "true or false");
  return json[key].get<bool>();
}

double ConfigReader::number(const std::string& key, double fallback, double low,
                            double high) const {
  if (!has(key)) return fallback;
  const Json& value = json[key];
  if (!value.is_number() || !(value.get<double>() >= low && value.get<double>() <= high)) {
    refuse(key, "config.json has an impossible value", fmt::format("{} to {}", low, high));
  }
  return value.get<double>();
}

std::string ConfigReader::text(const std::string& key, const std::string& fallback) const {
  if (!has(key)) return fallback;
  if (!json[key].is_string()) refuse(key, "not a name", "a name");
  return json[key].get<std::string>();
}

}  // namespace oscar
