// Windows joined from the pieces of one stream.
#include "oscar/eval/strided_windows.h"

#include <fmt/format.h>

#include "oscar/base/error.h"

namespace oscar {

std::vector<std::vector<int32_t>> strided_windows(const TokenChunks& pieces, int64_t window,
                                                  int64_t stride) {
  if (window % stride != 0) {
    throw Error({.what = "the stride does not divide the window",
                 .where = "--stride",
                 .expected = fmt::format("a divisor of {}", window),
                 .found = std::to_string(stride)});
  }
  const auto& sources = pieces.record.sources;
  if (sources.size() != 1 || sources.front().kind == "ids_2d") {
    throw Error({.what = "overlapping windows need one stream of tokens",
                 .where = "--stride",
                 .expected = "one corpus of text, or of token ids in one dimension",
                 .found = sources.size() == 1 ? "rows that are kept apart"
                                              : fmt::format("{} sources", sources.size())});
  }
  const auto per_window = static_cast<size_t>(window / stride);
  size_t whole = pieces.chunks.size();
  if (whole > 0 && static_cast<int64_t>(pieces.chunks.back().size()) < stride) --whole;
  if (whole < per_window) {
    throw Error({.what = "the corpus is shorter than one window",
                 .where = "--chunk-len, --stride",
                 .expected = fmt::format("{} tokens", window),
                 .found = std::to_string(pieces.record.tokens)});
  }
  std::vector<std::vector<int32_t>> windows;
  for (size_t first = 0; first + per_window <= whole; ++first) {
    std::vector<int32_t>& tokens = windows.emplace_back();
    for (size_t i = first; i < first + per_window; ++i) {
      tokens.insert(tokens.end(), pieces.chunks[i].begin(), pieces.chunks[i].end());
    }
  }
  return windows;
}

}  // namespace oscar
