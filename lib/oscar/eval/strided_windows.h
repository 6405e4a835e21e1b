// Overlapping windows over one stream, so that every scored token has a long context.
#pragma once

#include <cstdint>
#include <vector>

#include "oscar/data/corpus.h"

namespace oscar {

// `pieces` is one stream cut every `stride` tokens (load_corpus with chunk_len = stride). Window w
// holds `window` tokens and begins at piece w; its last `stride` tokens are scored, so that none is
// scored twice and each has at least window - stride tokens before it. A last piece that is shorter
// is left out. Throws Error when stride does not divide window, when the corpus has several sources
// or rows kept apart, or when it is shorter than one window.
std::vector<std::vector<int32_t>> strided_windows(const TokenChunks& pieces, int64_t window,
                                                  int64_t stride);

}  // namespace oscar
