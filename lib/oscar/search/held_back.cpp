// The split as a pure function of chunk lengths.
#include "oscar/search/held_back.h"

#include <fmt/format.h>

#include <algorithm>

namespace oscar {

HeldBack hold_back(const std::vector<std::vector<int32_t>>& chunks,
                   const QuantizerSettings& quantizer, bool full) {
  const int64_t shortest =
      int64_t{quantizer.sink_tokens} + quantizer.recent_tokens + kFewestQueries;
  std::vector<size_t> usable;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (static_cast<int64_t>(chunks[i].size()) >= shortest) usable.push_back(i);
  }
  HeldBack split;
  if (static_cast<int64_t>(usable.size()) < 2 * kFewestHeldBack) {
    split.reason = fmt::format(
        "choices are those of the preset: to hold text back for a search, at least {} chunks of "
        "{} tokens are needed, and there {} {}",
        2 * kFewestHeldBack, shortest, usable.size() == 1 ? "is" : "are", usable.size());
    usable.clear();
  } else {
    const auto quarter = static_cast<int64_t>(chunks.size() / 4);
    const int64_t wanted =
        std::clamp(quarter, kFewestHeldBack, full ? kMostHeldBackFull : kMostHeldBack);
    const auto count = std::min<size_t>(static_cast<size_t>(wanted), usable.size() / 2);
    usable.erase(usable.begin(), usable.end() - static_cast<std::ptrdiff_t>(count));
  }
  for (size_t i = 0, next = 0; i < chunks.size(); ++i) {
    if (next < usable.size() && usable[next] == i) {
      const bool last_of_pair = (usable.size() - next) % 2 == 1;
      (last_of_pair ? split.confirm : split.search).push_back(i);
      ++next;
    } else {
      split.fit.push_back(i);
    }
  }
  return split;
}

TokenChunks select_chunks(const TokenChunks& corpus, const std::vector<size_t>& indices) {
  TokenChunks selected{.chunks = {}, .record = corpus.record};
  selected.record.tokens = 0;
  for (const size_t i : indices) {
    selected.chunks.push_back(corpus.chunks[i]);
    selected.record.tokens += static_cast<int64_t>(corpus.chunks[i].size());
  }
  return selected;
}

}  // namespace oscar
