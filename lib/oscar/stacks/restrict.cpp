// Part by part: what the stack serves, what was asked for, what is left.
#include "oscar/stacks/restrict.h"

#include <fmt/format.h>

#include <algorithm>

#include "oscar/base/error.h"

namespace oscar {
namespace {

struct Restriction {
  const Stack& stack;
  const NamedOptions& named;

  [[noreturn]] void refuse(const std::string& option, const std::string& why,
                           const std::string& expected = "") const {
    const auto place = named.find(option);
    throw Error({.what = fmt::format("{} {}", stack.name, why),
                 .where = place == named.end() ? option : option + " " + place->second,
                 .expected = expected,
                 .hint = fmt::format("leave out {}, or --for {}", option, stack.name)});
  }

  // Keeps `value` when it is served; else takes `instead`, unless the option was named.
  template <typename T>
  void limit(const char* option, bool served, T& value, T instead, const std::string& why) const {
    if (served) return;
    if (named.contains(option)) refuse(option, why);
    value = instead;
  }
};

void limit_transforms(const Restriction& r, StackChoice& c) {
  const Stack& stack = r.stack;
  r.limit("--granularity", stack.per_head || c.fit.granularity == Granularity::kShared,
          c.fit.granularity, Granularity::kShared, "takes one transform a layer");
  c.search.granularity = c.search.granularity && stack.per_head;
  const bool any_kind = stack.key_partner && stack.value_partner;
  r.limit("--method", any_kind || c.fit.kind != TransformKind::kBalanced, c.fit.kind,
          TransformKind::kOscar, "takes orthogonal transforms");
  c.search.orthogonal = c.search.orthogonal || !any_kind;
  if (!stack.per_head && c.search.kind && r.named.contains("--method")) {
    r.refuse("--method", "takes one transform a layer, and the search chooses one a KV head");
  }
  c.search.kind = c.search.kind && stack.per_head;
  const bool centring =
      stack.key_mean && stack.value_mean && stack.windows == WindowBasis::kTransformed;
  r.limit("--center", centring || !c.fit.center, c.fit.center, false,
          stack.key_mean ? "has no place for a mean of values,\n  and a fit takes off both means"
                         : "has no place for means");
  c.search.center = c.search.center && centring;
  r.limit("--key-centers", stack.key_centres || !c.fit.key_centres, c.fit.key_centres, false,
          "codes keys about one mean at most");
  c.search.key_centres = c.search.key_centres && stack.key_centres;
}

void limit_writer(const Restriction& r, StackChoice& c) {
  const Stack& stack = r.stack;
  r.limit("--rounding", stack.shaped_rounding || c.fit.rounding == Rounding::kPlain, c.fit.rounding,
          Rounding::kPlain, "rounds codes to the nearest");
  c.search.rounding = c.search.rounding && stack.shaped_rounding;
  r.limit("--scale-correction",
          stack.scale_correction || c.fit.scale_correction == ScaleCorrection::kNone,
          c.fit.scale_correction, ScaleCorrection::kNone, "does not correct scales");
  c.search.scale_correction = c.search.scale_correction && stack.scale_correction;
}

void limit_clipping(const Restriction& r, StackChoice& c) {
  if (r.stack.clip == ClipScope::kHead) return;
  const bool one_for_all = r.stack.clip == ClipScope::kModelBoth;
  c.search.clip_scope = r.stack.clip;
  if (r.named.contains("--clip") && !c.search.clip) {
    if (one_for_all && c.fit.clip_k != c.fit.clip_v) {
      r.refuse("--clip", "has one clipping ratio for keys and values");
    }
    return;
  }
  c.fit.clip_k = kPublishedClipK;
  c.fit.clip_v = one_for_all ? kPublishedClipK : kPublishedClipV;
}

void limit_codec(const Restriction& r, StackChoice& c) {
  const Stack& stack = r.stack;
  QuantizerSettings& q = c.quantizer;
  const auto& sizes = stack.quant_group_sizes;
  if (std::find(sizes.begin(), sizes.end(), q.quant_group_size) == sizes.end()) {
    r.limit("--quant-group-size", false, q.quant_group_size, sizes.front(),
            "takes no quantization groups of that size");
    c.quant_group_sizes = sizes;
  }
  if (!r.named.contains("--metadata-dtype")) {
    q.metadata_dtype = stack.metadata.front().dtype;
  }
  take_rules_of(stack, q);
  const std::string gap = codec_gap(stack, q);
  if (!gap.empty()) r.refuse("--metadata-dtype", "is not served with it:\n  " + gap);
  for (const auto& [option, tokens] :
       {std::pair{"--sink", q.sink_tokens}, {"--recent", q.recent_tokens}}) {
    if (tokens % stack.window_multiple != 0) {
      r.refuse(option,
               fmt::format("takes windows of multiples of {} tokens", stack.window_multiple));
    }
  }
}

}  // namespace

StackChoice restrict_to(const Stack& stack, StackChoice choice, const NamedOptions& named) {
  if (!is_served(stack)) {
    throw Error({.what = "not served yet, because\n  " + codec_gap(stack, default_codec(stack)),
                 .where = std::string("--for ") + stack.name,
                 .expected = stack_names(true),
                 .hint = "its portable variant is in every bundle; oscar-bundle stacks lists all"});
  }
  const FitOptions wanted = choice.fit;
  const Restriction restriction{stack, named};
  limit_transforms(restriction, choice);
  limit_writer(restriction, choice);
  limit_clipping(restriction, choice);
  limit_codec(restriction, choice);
  choice.search.fallback = choice.search.fallback && choice.fit == wanted;
  return choice;
}

}  // namespace oscar
