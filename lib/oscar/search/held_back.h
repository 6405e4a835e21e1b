// Which chunks of a corpus the fit never sees, so that candidates can be compared and confirmed on
// them (math 9.1).
#pragma once

#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/data/corpus.h"

namespace oscar {

// Queries behind the exact windows that a chunk must have to be worth holding back.
inline constexpr int64_t kFewestQueries = 128;
inline constexpr int64_t kFewestHeldBack = 2;
// Of a long corpus no more are needed: quick search, full search.
inline constexpr int64_t kMostHeldBack = 8, kMostHeldBackFull = 16;

// Indices of chunks, ascending. Every chunk is in exactly one list.
struct HeldBack {
  std::vector<size_t> fit, search, confirm;
  std::string reason;  // why nothing is held back; "" when something is
};

// A quarter of the chunks (rounded down), kFewestHeldBack to kMostHeldBack of them: the last ones
// that have at least sink + recent + kFewestQueries tokens. They go to the two halves in turn, the
// last one to confirmation, so that both see the same mixture. Nothing is held back when fewer
// than 2 * kFewestHeldBack chunks are long enough.
HeldBack hold_back(const std::vector<std::vector<int32_t>>& chunks,
                   const QuantizerSettings& quantizer, bool full);

// The chunks of `indices` in that order, with the record of the whole corpus but for `tokens`.
TokenChunks select_chunks(const TokenChunks& corpus, const std::vector<size_t>& indices);

}  // namespace oscar
