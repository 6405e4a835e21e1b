// How much of a text repeats itself, by rolling hashes of its stretches.
#include "oscar/text/repeats.h"

#include <unordered_set>

namespace oscar {

double repeated_share(const std::vector<std::vector<int32_t>>& sequences) {
  constexpr uint64_t kBase = 0x9E3779B97F4A7C15;
  constexpr size_t kCountedWhole = size_t{1} << 20;  // tokens of which all stretches are remembered
  size_t tokens = 0;
  for (const auto& sequence : sequences) tokens += sequence.size();
  const uint64_t one_in = tokens <= kCountedWhole ? 1 : 16;  // sampled by value
  uint64_t leaving = 1;  // what the oldest token counts in the hash
  for (int i = 1; i < kRepeatedTokens; ++i) leaving *= kBase;
  std::unordered_set<uint64_t> seen;
  int64_t sampled = 0;
  for (const auto& sequence : sequences) {
    uint64_t hash = 0;
    for (size_t i = 0; i < sequence.size(); ++i) {
      const auto digit = [&](size_t at) { return static_cast<uint64_t>(sequence[at]) + 1; };
      if (i >= kRepeatedTokens) hash -= leaving * digit(i - kRepeatedTokens);
      hash = hash * kBase + digit(i);
      const uint64_t mixed = (hash ^ hash >> 32) * kBase;
      if (i + 1 < kRepeatedTokens || (mixed >> 32) % one_in != 0) continue;
      ++sampled;
      seen.insert(hash);
    }
  }
  if (sampled == 0) return 0;
  return 1 - static_cast<double>(seen.size()) / static_cast<double>(sampled);
}

}  // namespace oscar
