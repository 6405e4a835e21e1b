// The INT2 rule of each mode.
#include "oscar/int2/cache_view.h"

#include <algorithm>
#include <charconv>

#include "oscar/base/usage_error.h"

namespace oscar {
namespace {

int64_t decode_end(const CacheView& view, int64_t i) {
  const int64_t demoted = i + 1 - view.recent - view.sink;
  if (demoted <= 0) return view.sink;
  return view.sink + demoted / view.demote_block * view.demote_block;
}

}  // namespace

CacheView cache_view(const QuantizerSettings& quantizer, int sliding_window) {
  return {.sink = quantizer.sink_tokens,
          .recent = quantizer.recent_tokens,
          .demote_block = quantizer.demote_block,
          .sliding_window = sliding_window};
}

int64_t int2_end(const CacheView& view, int64_t i) {
  if (i >= view.prompt || view.mode == CacheModeKind::kDecode) return decode_end(view, i);
  if (view.mode == CacheModeKind::kPrefill) return view.sink;
  return decode_end(view, i / view.chunk * view.chunk - 1);
}

int64_t first_visible(const CacheView& view, int64_t i) {
  return view.sliding_window > 0 ? std::max<int64_t>(0, i - view.sliding_window + 1) : 0;
}

std::vector<QueryBlock> query_blocks(const CacheView& view, int64_t first, int64_t last,
                                     int64_t max_queries) {
  std::vector<QueryBlock> blocks;
  int64_t begin = first;
  for (int64_t i = first + 1; i <= last; ++i) {
    if (i == last || i - begin == max_queries ||
        int2_end(view, i) - int2_end(view, begin) > max_queries) {
      blocks.push_back({begin, i});
      begin = i;
    }
  }
  return blocks;
}

void parse_cache_mode(const std::string& text, CacheView& view) {
  view.chunk = 0;
  if (text == "decode") {
    view.mode = CacheModeKind::kDecode;
    return;
  }
  if (text == "prefill") {
    view.mode = CacheModeKind::kPrefill;
    return;
  }
  const std::string prefix = "chunked:";
  const char* const end = text.data() + text.size();
  if (text.rfind(prefix, 0) == 0) {
    const auto [stop, status] = std::from_chars(text.data() + prefix.size(), end, view.chunk);
    if (status == std::errc() && stop == end && view.chunk > 0) {
      view.mode = CacheModeKind::kChunked;
      return;
    }
  }
  throw UsageError({.what = "unknown cache mode",
                    .where = "--mode",
                    .expected = "decode, prefill or chunked:N with N > 0",
                    .found = text});
}

std::string cache_mode_name(const CacheView& view) {
  switch (view.mode) {
    case CacheModeKind::kPrefill:
      return "prefill";
    case CacheModeKind::kChunked:
      return "chunked:" + std::to_string(view.chunk);
    case CacheModeKind::kDecode:
      break;
  }
  return "decode";
}

}  // namespace oscar
