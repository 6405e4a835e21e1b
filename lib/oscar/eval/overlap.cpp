// Shares and their warnings.
#include "oscar/eval/overlap.h"

#include <fmt/format.h>

#include "oscar/eval/estimate.h"

namespace oscar {
namespace {

void warn(const Json& bundle, std::vector<std::string>& warnings) {
  if (!bundle.is_object() || !bundle.contains("overlap")) return;
  const Json& overlap = bundle["overlap"];
  if (!overlap.contains("share") || overlap["low"].get<double>() <= kNotableOverlap) return;
  warnings.push_back(
      fmt::format("{:.0f}% of the evaluation's {}-grams are in the calibration text of {}: the "
                  "figures flatter the bundle; evaluate on other text",
                  100 * overlap["share"].get<double>(), overlap["ngram"].get<int>(),
                  bundle["file"].get<std::string>()));
}

}  // namespace

Json overlap_json(const NgramFingerprint& fingerprint,
                  const std::vector<std::vector<int32_t>>& chunks, int64_t first_position) {
  Json json = {{"known", false}};
  if (fingerprint.empty()) return json;
  std::vector<std::vector<int32_t>> evaluated;
  for (const auto& chunk : chunks) {
    if (static_cast<int64_t>(chunk.size()) > first_position) evaluated.push_back(chunk);
  }
  const NgramOverlap overlap = overlap_with(fingerprint, evaluated);
  json["ngram"] = kNgramTokens;
  json["sampled"] = overlap.sampled;
  if (overlap.sampled == 0) return json;
  const auto [low, high] = wilson_interval(overlap.found, overlap.sampled);
  json["known"] = true;
  json["found"] = overlap.found;
  json["share"] = static_cast<double>(overlap.found) / static_cast<double>(overlap.sampled);
  json["low"] = low;
  json["high"] = high;
  return json;
}

std::vector<std::string> overlap_warnings(const Json& report) {
  std::vector<std::string> warnings;
  if (const auto bundle = report.find("bundle"); bundle != report.end()) warn(*bundle, warnings);
  if (const auto bundles = report.find("bundles"); bundles != report.end()) {
    for (const auto& entry : bundles->items()) warn(entry.value(), warnings);
  }
  return warnings;
}

}  // namespace oscar
