// What several families read alike.
#include "oscar/checkpoint/families/families.h"

#include <fmt/format.h>

#include "oscar/base/error.h"

namespace oscar {

std::vector<LayerSpec> dense_layers(const ConfigReader& reader, const ModelConfig& config,
                                    const AttentionSpec& attention, int default_intermediate_size,
                                    bool mlp_bias) {
  const DenseSpec mlp{
      .intermediate_size =
          reader.size("intermediate_size", kMaxWidth).value_or(default_intermediate_size),
      .bias = mlp_bias};
  return {static_cast<size_t>(config.num_layers), LayerSpec{attention, mlp}};
}

int read_one_of(const ConfigReader& reader, const std::string& key, const std::string& other,
                int fallback) {
  const auto first = reader.size(key, kMaxExperts, 0), second = reader.size(other, kMaxExperts, 0);
  if (first && second && *first != *second) {
    reader.refuse(other, "two keys disagree", fmt::format("{} as of {}", *first, key));
  }
  return first ? *first : second.value_or(fallback);
}

void require_enough_experts(const ConfigReader& reader, const ExpertsSpec& experts) {
  const int choices = experts.num_experts / experts.num_sets * experts.top_sets;
  if (experts.top_k > choices) {
    reader.refuse("num_experts_per_tok", "more experts are chosen than there are",
                  fmt::format("1 to {}", choices));
  }
}

int read_window(const ConfigReader& reader, int fallback) {
  return reader.size("sliding_window", kMaxLength)
      .value_or(reader.json.contains("sliding_window") ? 0 : fallback);
}

std::vector<AttentionKind> read_layer_types(const ConfigReader& reader, int num_layers) {
  std::vector<AttentionKind> kinds;
  if (!reader.has("layer_types")) return kinds;
  const Json& list = reader.json["layer_types"];
  if (!list.is_array() || list.size() != static_cast<size_t>(num_layers)) {
    reader.refuse("layer_types", "not one type per layer", fmt::format("{} names", num_layers));
  }
  for (const Json& name : list) {
    if (name != kFullAttention && name != kSlidingAttention) {
      throw Error({.what = "this layer type is not implemented",
                   .where = reader.source + ": layer_types",
                   .expected = "full_attention or sliding_attention",
                   .found = name.dump()});
    }
    kinds.push_back(name == kFullAttention ? AttentionKind::kFull : AttentionKind::kSliding);
  }
  return kinds;
}

void require_one_layer_type(const ConfigReader& reader, int num_layers, AttentionKind kind) {
  for (const AttentionKind named : read_layer_types(reader, num_layers)) {
    if (named == kind) continue;
    reader.refuse("layer_types", "this family does not mix layer types",
                  kind == AttentionKind::kSliding ? "sliding_attention in every layer"
                                                  : "full_attention in every layer");
  }
}

}  // namespace oscar
