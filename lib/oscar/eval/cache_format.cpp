// Options before bundles, and all bundles alike.
#include "oscar/eval/cache_format.h"

#include "oscar/base/error.h"

namespace oscar {
namespace {

QuantizerSettings with_overrides(QuantizerSettings settings, const EvaluateOptions& options) {
  if (options.sink) settings.sink_tokens = *options.sink;
  if (options.recent) settings.recent_tokens = *options.recent;
  if (options.quant_group_size) settings.quant_group_size = *options.quant_group_size;
  if (options.demote_block) settings.demote_block = *options.demote_block;
  if (options.metadata_dtype) settings.metadata_dtype = *options.metadata_dtype;
  return settings;
}

}  // namespace

Json format_json(const QuantizerSettings& settings) {
  return {{"bits", settings.bits},
          {"sink", settings.sink_tokens},
          {"recent", settings.recent_tokens},
          {"quant_group_size", settings.quant_group_size},
          {"metadata_dtype", codec_word(settings.metadata_dtype)},
          {"demote_block", settings.demote_block},
          {"clip_span", codec_word(settings.rules.clip_span)},
          {"zero", codec_word(settings.rules.zero)},
          {"ties", codec_word(settings.rules.ties)},
          {"metadata_rounding", codec_word(settings.rules.metadata_rounding)}};
}

QuantizerSettings common_format(const EvaluateOptions& options, int head_dim, const Bundle* bundle,
                                std::span<const NamedBundle> named) {
  QuantizerSettings settings;
  settings.quant_group_size = head_dim;
  if (!named.empty()) settings = named.front().bundle.quantizer;
  if (bundle) settings = bundle->quantizer;
  settings = with_overrides(settings, options);
  const Json shared = format_json(settings);
  for (const NamedBundle& other : named) {
    const Json own = format_json(with_overrides(other.bundle.quantizer, options));
    if (own == shared) continue;
    throw Error(
        {.what = "the bundles are for caches of different formats",
         .where = "--bundle " + other.name,
         .expected = shared.dump(),
         .found = own.dump(),
         .hint = "windows, groups and metadata can be given, as with --sink; rules of the codec "
                 "(clip_span, zero, ties, metadata_rounding) can't"});
  }
  return settings;
}

}  // namespace oscar
