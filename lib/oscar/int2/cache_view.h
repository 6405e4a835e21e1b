// Which keys a query reads as INT2 and which exactly (math 4.7): every mode, as pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"

namespace oscar {

enum class CacheModeKind : uint8_t { kDecode, kPrefill, kChunked };

// Windows and mode that decide what a query sees. Positions are indices within the sequence.
struct CacheView {
  int64_t sink = 64, recent = 256;
  int64_t demote_block = 1;    // B: tokens leave the recent window B at a time
  int64_t sliding_window = 0;  // keys visible to a query, itself included; 0 = all before it
  CacheModeKind mode = CacheModeKind::kDecode;
  int64_t chunk = 0;   // tokens of one prefill chunk (kChunked)
  int64_t prompt = 0;  // queries below this belong to the prompt; kDecode has none
};

// The decode view of the quantizer's windows.
CacheView cache_view(const QuantizerSettings& quantizer, int sliding_window = 0);

// First key position after the INT2 region of query `i`: key j <= i is INT2 iff sink <= j < h(i)
// (and j is visible). h(i) = sink + B floor((i + 1 - recent - sink) / B), at least sink.
// kPrefill: prompt queries read everything exactly. kChunked: a prompt query reads its own chunk
// exactly and the chunks before as the cache held them when the chunk began, h(chunk start - 1).
// Queries from `prompt` on follow the decode rule. Never decreases with i.
int64_t int2_end(const CacheView& view, int64_t i);

// First key that query `i` sees: 0, or i - sliding_window + 1.
int64_t first_visible(const CacheView& view, int64_t i);

// One block [first, last) of queries.
struct QueryBlock {
  int64_t first = 0, last = 0;
};

// Splits queries [first, last) into blocks of at most `max_queries` over which int2_end grows by at
// most `max_queries` (a block of one query may grow by more).
std::vector<QueryBlock> query_blocks(const CacheView& view, int64_t first, int64_t last,
                                     int64_t max_queries);

// "decode", "prefill", "chunked:N". Throws UsageError for anything else.
void parse_cache_mode(const std::string& text, CacheView& view);
std::string cache_mode_name(const CacheView& view);

}  // namespace oscar
