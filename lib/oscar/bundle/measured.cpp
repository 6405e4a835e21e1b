#include "oscar/bundle/measured.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "oscar/cache/codec.h"
#include "oscar/text/ngram_fingerprint.h"

namespace oscar {

namespace {

// Null where there is none.
const Json& entry(const Json& json, const char* name) {
  static const Json none;
  const auto place = json.find(name);
  return place == json.end() ? none : *place;
}

// A number or word of a report, as text; "" where it is neither.
std::string word(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.is_number() ? value.dump() : "";
}

// First token of a text that reads an INT2 row. Of a prompt in prefill chunks, none of the first
// chunk does.
int64_t first_reader(const CacheFormat& own, const std::string& mode) {
  constexpr std::string_view kChunked = "chunked:";
  const int64_t windows = int64_t{own.sink_tokens} + own.recent_tokens + own.demote_block - 1;
  if (!mode.starts_with(kChunked)) return windows;
  return std::max<int64_t>(windows, std::strtoll(mode.c_str() + kChunked.size(), nullptr, 10));
}

// Of one method of a report; absent where it was not compared or is not finite.
std::optional<double> kl_of(const Json& methods, const char* name) {
  const Json& mean = entry(entry(entry(methods, name), "kl"), "mean");
  if (!mean.is_number() || !std::isfinite(mean.get<double>())) return std::nullopt;
  return mean.get<double>();
}

}  // namespace

std::optional<ErrorInfo> other_cache(const CacheFormat& own, const Json& report) {
  const std::pair<const char*, std::string> settings[] = {
      {"bits", std::to_string(own.bits)},
      {"sink", std::to_string(own.sink_tokens)},
      {"recent", std::to_string(own.recent_tokens)},
      {"quant_group_size", std::to_string(own.quant_group_size)},
      {"metadata_dtype", codec_word(own.metadata_dtype)},
      {"demote_block", std::to_string(own.demote_block)},
      {"clip_span", codec_word(own.rules.clip_span)},
      {"zero", codec_word(own.rules.zero)},
      {"ties", codec_word(own.rules.ties)},
      {"metadata_rounding", codec_word(own.rules.metadata_rounding)}};
  const Json& measured = entry(report, "quantizer");
  for (const auto& [key, value] : settings) {
    const std::string found = word(entry(measured, key));
    if (found == value || found.empty()) continue;  // reports of earlier versions name fewer
    return ErrorInfo{.what = "the evaluation ran with another cache than the bundle asks for",
                     .expected = fmt::format("{} {}", key, value),
                     .found = fmt::format("{} {}", key, found),
                     .hint = "leave --sink, --recent and the like away"};
  }
  const Json& offset = entry(report, "position_offset");
  if (offset.is_number_integer() && offset.get<int64_t>() != 0) {
    return ErrorInfo{.what = "the evaluation ran at other positions than a text begins at",
                     .expected = "position_offset 0",
                     .found = fmt::format("position_offset {}", offset.get<int64_t>()),
                     .hint = "leave --position-offset away"};
  }
  const Json& first = entry(report, "first_position");
  const int64_t reader = first_reader(own, word(entry(report, "mode")));
  if (!first.is_number_integer() || first.get<int64_t>() >= reader) return std::nullopt;
  return ErrorInfo{.what = "the evaluation counts tokens that read no INT2 row",
                   .expected = fmt::format("--first-position {} or later", reader),
                   .found = fmt::format("first_position {}", first.get<int64_t>()),
                   .hint = fmt::format("measure with --first-position {}", reader)};
}

MeasuredKl measured_kl(const Json& report) {
  const Json& methods = entry(report, "methods");
  const Json& seen = entry(entry(entry(report, "bundle"), "overlap"), "low");
  return {.own = kl_of(methods, "bundle"),
          .shared = kl_of(methods, "portable"),
          .per_head = kl_of(methods, "portable-perhead"),
          .on_calibration_text = seen.is_number() && seen.get<double>() > kNotableOverlap};
}

MeasuredKl measured_kl(const Bundle& bundle) {
  const bool taken = bundle.evaluation && !other_cache(bundle.quantizer, *bundle.evaluation);
  return taken ? measured_kl(*bundle.evaluation) : MeasuredKl{};
}

std::string left_out_evaluation(const Bundle& bundle) {
  if (!bundle.evaluation) return "";
  const auto gap = other_cache(bundle.quantizer, *bundle.evaluation);
  if (!gap) return "";
  return fmt::format("the stored evaluation is left out: {} ({}, not {})", gap->what, gap->found,
                     gap->expected);
}

}  // namespace oscar
