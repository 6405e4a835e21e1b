// Shares of n-grams, with their intervals.
#include "oscar/eval/overlap.h"

#include <algorithm>

#include "oscar/eval/estimate.h"

namespace oscar {
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

Json same_files_json(const CorpusRecord& calibrated, const CorpusRecord& evaluated) {
  int64_t all = 0, same = 0;
  for (const CorpusSource& source : evaluated.sources) {
    all += source.tokens_used;
    const auto is_it = [&](const CorpusSource& other) {
      return !other.sha256.empty() && other.sha256 == source.sha256;
    };
    if (std::any_of(calibrated.sources.begin(), calibrated.sources.end(), is_it)) {
      same += source.tokens_used;
    }
  }
  if (same == 0) return {{"known", false}};
  const double share = static_cast<double>(same) / static_cast<double>(all);
  return {{"known", true}, {"by_files", true}, {"share", share}, {"low", share}, {"high", share}};
}

}  // namespace oscar
