// The table of serving stacks as JSON, and from that as text of 80 columns.
#include <fmt/format.h>

#include "oscar/base/text_lines.h"
#include "oscar/stacks/stacks.h"

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
      name += metadata.rounded_before_coding ? " rounded before coding" : " rounded after coding";
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
    add_line(text, word("name"), word("summary"));
    add_line(text, "  --for",
             j["served"].get<bool>() ? "served"
                                     : "not served yet, because " + word("not_served_because"));
    add_line(text, "  rotation",
             fmt::format("{}, stored as {}; others than orthogonal: keys {}, values {}",
                         word("rotation"), word("file_holds"), word("keys_not_orthogonal"),
                         word("values_not_orthogonal")));
    add_line(text, "  mean",
             fmt::format("of keys {}, of values {}", word("mean_of_keys"), word("mean_of_values")));
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

}  // namespace oscar
