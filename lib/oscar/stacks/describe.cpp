// Words for each value of the table, of a choice and of a plan.
#include "oscar/stacks/describe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "oscar/base/text_lines.h"
#include "oscar/fit/presets.h"

namespace oscar {
namespace {

const char* clip_name(ClipScope scope) {
  switch (scope) {
    case ClipScope::kHead:
      return "a ratio for each layer, KV head and side";
    case ClipScope::kLayer:
      return "a ratio for each layer and side";
    case ClipScope::kModel:
      return "one ratio for all keys, one for all values";
    case ClipScope::kModelBoth:
      break;
  }
  return "one ratio";
}

const char* span_name(const Stack& stack) {
  if (stack.own_levels) return "each 128 values less their mean";
  return stack.rules.clip_span == ClipSpan::kHeadRow ? "the head's row" : "each quantization group";
}

const char* zero_name(const Stack& stack) {
  if (stack.own_levels) return "mean and spread of the row";
  return stack.rules.zero == ZeroForm::kCodeUnits ? "zero point in code units"
                                                  : "minimum of the row";
}

const char* rounding_rule(const Stack& stack) {
  if (stack.own_levels) return "fixed thresholds";
  return stack.rules.ties == CodeTies::kUp ? "nearest, halves up" : "nearest, halves to even";
}

std::string joined(const Json& list, const char* separator = ", ") {
  std::string text;
  for (const Json& entry : list) {
    text += (text.empty() ? "" : separator) + entry.get<std::string>();
  }
  return text;
}

Json group_names(const Stack& stack) {
  Json names = Json::array();
  for (const int size : stack.quant_group_sizes) {
    names.push_back(size == 0 ? std::string("head_dim") : std::to_string(size));
  }
  return names;
}

Json metadata_names(const Stack& stack) {
  Json names = Json::array();
  for (const StackMetadata& metadata : stack.metadata) {
    std::string name = codec_word(metadata.dtype);
    if (metadata.dtype != MetadataDtype::kFp32) {
      name += metadata.rounding == MetadataRounding::kBeforeCoding ? " rounded before coding"
                                                                   : " rounded after coding";
    }
    if (metadata.whole_head_only) name += " for whole heads";
    names.push_back(std::move(name));
  }
  return names;
}

Json describe(const Stack& stack) {
  const auto either = [](bool yes) { return yes ? "yes" : "no"; };
  return {{"name", stack.name},
          {"summary", stack.summary},
          {"source", stack.source},
          {"served", is_served(stack)},
          {"not_served_because", codec_gap(stack, default_codec(stack))},
          {"rotation", stack.per_head ? "one a KV head" : "one a layer"},
          {"file_holds", stack.transposed_file ? "R^T" : "R"},
          {"keys_not_orthogonal", either(stack.key_partner)},
          {"values_not_orthogonal", either(stack.value_partner)},
          {"mean_of_keys", either(stack.key_mean)},
          {"mean_of_values", either(stack.value_mean)},
          {"two_centres_of_keys", either(stack.key_centres)},
          {"shaped_rounding", either(stack.shaped_rounding)},
          {"scale_correction", either(stack.scale_correction)},
          {"quant_group_sizes", group_names(stack)},
          {"metadata", metadata_names(stack)},
          {"zero", zero_name(stack)},
          {"code_rounding", rounding_rule(stack)},
          {"packing", stack.packing == PackOrder::kQuartered ? "quartered" : "consecutive"},
          {"clip", clip_name(stack.clip)},
          {"clip_span", span_name(stack)},
          {"windows", stack.windows == WindowBasis::kTransformed ? "transformed" : "original"},
          {"window_multiple", stack.window_multiple},
          {"head_dim_multiple", stack.head_dim_multiple},
          {"largest_head_dim", stack.largest_head_dim},
          {"power_of_two_head", stack.power_of_two_head},
          {"sliding_layers", stack.sliding_layers},
          {"architectures", stack.architectures}};
}

std::string head_dims(const Json& j) {
  return fmt::format("{}multiples of {} up to {}",
                     j["power_of_two_head"].get<bool>() ? "powers of two, " : "",
                     j["head_dim_multiple"].get<int>(), j["largest_head_dim"].get<int>());
}

}  // namespace

Json stacks_json() {
  Json list = Json::array();
  for (const Stack& stack : stacks()) list.push_back(describe(stack));
  return list;
}

std::string stacks_text() {
  std::string text;
  for (const Json& j : stacks_json()) {
    const auto word = [&j](const char* name) { return j[name].get<std::string>(); };
    if (!text.empty()) text += "\n";
    add_line(text, "", word("name") + ": " + word("summary"), 0);
    add_line(text, "  --for",
             j["served"].get<bool>() ? "served"
                                     : "not served yet, because " + word("not_served_because"));
    add_line(text, "  rotation",
             fmt::format("{}, stored as {}; others than orthogonal: keys {}, values {}",
                         word("rotation"), word("file_holds"), word("keys_not_orthogonal"),
                         word("values_not_orthogonal")));
    add_line(text, "  mean",
             fmt::format("of keys {}, of values {}; two centres of keys {}", word("mean_of_keys"),
                         word("mean_of_values"), word("two_centres_of_keys")));
    add_line(text, "  writer",
             fmt::format("{}, shaped {}, scale correction {}", word("code_rounding"),
                         word("shaped_rounding"), word("scale_correction")));
    add_line(text, "  groups", joined(j["quant_group_sizes"]));
    add_line(text, "  metadata", joined(j["metadata"]) + "; scale and " + word("zero"));
    add_line(text, "  packing", word("packing"));
    add_line(text, "  clipping", word("clip") + ", over " + word("clip_span"));
    add_line(text, "  windows",
             fmt::format("in the {} basis, multiples of {} tokens", word("windows"),
                         j["window_multiple"].get<int>()));
    add_line(text, "  head_dim", head_dims(j));
    add_line(text, "  models",
             fmt::format("{}, {}", j["architectures"].empty() ? "any" : joined(j["architectures"]),
                         j["sliding_layers"].get<bool>() ? "also with sliding windows"
                                                         : "full attention in every layer"));
    add_line(text, "  source", word("source"));
  }
  return text;
}

namespace {

const char* clip_searched(ClipScope scope) {
  switch (scope) {
    case ClipScope::kHead:
      return "clipping";
    case ClipScope::kLayer:
      return "clipping of each layer";
    case ClipScope::kModel:
      return "one clipping pair";
    case ClipScope::kModelBoth:
      break;
  }
  return "one clipping ratio";
}

std::string groups_in_words(const StackChoice& choice) {
  const std::vector<int>& sizes = choice.quant_group_sizes;
  if (sizes.size() > 1) {
    return fmt::format("groups of {}, whichever first divides head_dim", fmt::join(sizes, ", "));
  }
  const int size = choice.quantizer.quant_group_size;
  return size == 0 ? "groups of head_dim" : fmt::format("groups of {}", size);
}

}  // namespace

std::vector<std::string> describe_choice(const StackChoice& choice) {
  const FitOptions& fit = choice.fit;
  const SearchOptions& search = choice.search;
  const auto part = [](bool searched, const char* name, const std::string& fixed) {
    return searched ? fmt::format("{} searched", name) : fixed;
  };
  const QuantizerSettings& q = choice.quantizer;
  return {
      part(search.kind, search.orthogonal ? "orthogonal transform" : "transform",
           method_name(fit.kind)),
      part(search.granularity, "granularity", granularity_name(fit.granularity)),
      part(search.center, "centring", fit.center ? "centred" : "not centred"),
      part(search.row_weights, "row weights",
           fit.row_weights == RowWeights::kAttention ? "rows by attention" : "rows alike"),
      part(search.key_centres, "key centres",
           fit.key_centres ? "two key centres" : "one key centre"),
      part(search.rounding, "rounding", fmt::format("{} rounding", rounding_name(fit.rounding))),
      part(search.scale_correction, "scale correction",
           fmt::format("scale correction {}", scale_correction_name(fit.scale_correction))),
      part(search.clip, clip_searched(search.clip_scope),
           fmt::format("clipping {},{} everywhere", clip_text(fit.clip_k), clip_text(fit.clip_v))),
      fmt::format("{} metadata", codec_word(q.metadata_dtype)),
      groups_in_words(choice),
  };
}

namespace {

const char* verdict_word(StackVerdict verdict) {
  switch (verdict) {
    case StackVerdict::kAsIs:
      return "as is";
    case StackVerdict::kPortable:
      return "portable";
    case StackVerdict::kCannot:
      break;
  }
  return "cannot";
}

// Of portable ones, as in oscar-eval --compare.
const char* variant_word(BundleVariant variant) {
  return variant == BundleVariant::kPortablePerHead ? "portable-perhead" : "portable";
}

std::string times_words(double factor) {
  return fmt::format("{:.{}f} times", factor, factor < 9.95 ? 1 : 0);
}

std::string error_words(const StackRun& run) {
  if (run.kl_factor) {
    return fmt::format(": KL about {}{}", times_words(*run.kl_factor),
                       *run.kl_factor >= kTooManyTimes ? ", do not serve" : "");
  }
  if (run.relative_error) {
    return fmt::format(": predicted error {}{}", times_words(*run.relative_error),
                       *run.relative_error >= kTooManyTimes ? ", measure first" : "");
  }
  switch (run.unknown.value_or(ErrorUnknown::kNotMeasured)) {
    case ErrorUnknown::kOwnLevels:
      return ", coded in its own way: error unknown";
    case ErrorUnknown::kNoClipLosses:
      return ": error unknown: no clip losses";
    case ErrorUnknown::kNotMeasured:
      break;
  }
  return ": error unknown: nothing was searched";
}

std::string plan_line(const StackPlan& plan) {
  switch (plan.verdict()) {
    case StackVerdict::kAsIs:
      return "runs as is";
    case StackVerdict::kPortable:
      return fmt::format("runs {}{}", variant_word(plan.run->variant), error_words(*plan.run));
    case StackVerdict::kCannot:
      break;
  }
  return "cannot: " + plan.obstacles.front().text;
}

Json describe(const StackPlan& plan) {
  std::string reason;
  for (const Obstacle& obstacle : plan.obstacles) {
    reason += (reason.empty() ? "" : "; ") + obstacle.text;
  }
  Json json = {{"name", plan.stack->name}, {"verdict", verdict_word(plan.verdict())},
               {"reason", reason},         {"variant", nullptr},
               {"clip", nullptr},          {"relative_error", nullptr},
               {"kl_factor", nullptr},     {"do_not_serve", false},
               {"line", plan_line(plan)}};
  if (plan.verdict() != StackVerdict::kPortable) return json;
  const StackRun& run = *plan.run;
  json["variant"] = variant_word(run.variant);
  if (run.clips.pair) json["clip"] = {run.clips.pair->key, run.clips.pair->value};
  if (run.relative_error) json["relative_error"] = *run.relative_error;
  if (run.kl_factor) {
    json["kl_factor"] = *run.kl_factor;
    json["do_not_serve"] = *run.kl_factor >= kTooManyTimes;
  }
  return json;
}

}  // namespace

Json plans_json(const std::vector<StackPlan>& plans) {
  Json list = Json::array();
  for (const StackPlan& plan : plans) list.push_back(describe(plan));
  return list;
}

std::string plans_text(const std::vector<StackPlan>& plans) {
  std::string text = "serving stacks\n", fitted;
  bool predicted = false, measured = false, without_losses = false;
  size_t widest = 0;
  for (const StackPlan& plan : plans) widest = std::max(widest, std::strlen(plan.stack->name));
  for (const StackPlan& plan : plans) {
    add_line(text, plan.stack->name, plan_line(plan), widest + 2);
    if (plan.verdict() != StackVerdict::kPortable) continue;
    measured = measured || plan.run->kl_factor;
    predicted = predicted || (!plan.run->kl_factor && plan.run->relative_error);
    without_losses = without_losses || plan.run->unknown == ErrorUnknown::kNoClipLosses;
    if (is_served(*plan.stack))
      fitted += (fitted.empty() ? "" : ", ") + std::string(plan.stack->name);
  }
  text +=
      "oscar_int2: this toolkit's package, in transformers and as a plugin of vLLM;\n"
      "vllm-pr46774: that pull request of vLLM, no release\n";
  if (measured) {
    text += "KL: measured by oscar-eval, over that of this bundle; in this toolkit's codec\n";
  }
  if (predicted) {
    text += fmt::format(
        "predicted error: of the attention output, over this bundle's, from calibration.\n"
        "It gives the order alone: measured KL was {} such a figure.\n"
        "oscar-eval MODEL --bundle FILE --corpus HELDOUT --write-back measures it\n",
        kPredictionWorth);
  }
  if (without_losses) {
    text += "no clip losses: the file keeps none, so the clipping pair is the published one\n";
  }
  if (!fitted.empty()) {
    text += "oscar-calibrate --for fits what runs as is on these:\n";
    add_line(text, "", fitted, 0);
  }
  return text;
}

}  // namespace oscar
