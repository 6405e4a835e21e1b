// What bounds the memory of a search, and how much that is.
#pragma once

#include <cstdint>

#include "oscar/checkpoint/model_config.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/search_options.h"
#include "oscar/model/torch.h"

namespace oscar {

// Queries of a chunk that are looked at while searching: quick, full.
inline constexpr int64_t kSearchQuick = 128, kSearchFull = 512;

// Queries that are looked at together at least.
inline constexpr int64_t kFewestTogether = 8;

// Limits that keep the memory of a search independent of corpus and model, where one chunk alone
// does not pass them. In float32 values.
struct SearchLimits {
  int64_t scores;      // of one part: a processor's cache, or enough to keep a GPU busy
  int64_t kept;        // scores and weights that are kept of a half
  int64_t chunk_rows;  // one side of the chunks of a batch
  int64_t rows;        // rows of all candidates that are quantized side by side
};
const SearchLimits& search_limits(torch::Device device);

// What is held back of a corpus for a search.
struct HeldBackSize {
  int64_t tokens = 0, search_chunks = 0, longest_chunk = 0;
};

// Bytes of the rows of one layer that are held back, while they are collected.
int64_t held_back_bytes(const ModelConfig& config, const HeldBackSize& held_back);

// Bytes on `device` that a search takes at most beside the forward pass and the statistics: the
// rows of one layer that are held back, in float32 and once more as the halves hold them; fits
// and rows of all candidates; scores and weights that are kept; and what is being worked on.
int64_t search_memory_bytes(const ModelConfig& config, const HeldBackSize& held_back,
                            const FitOptions& fixed, const SearchOptions& search,
                            torch::Device device);

}  // namespace oscar
