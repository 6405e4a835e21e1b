// The table of tensor names.
#include "oscar/checkpoint/weight_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "oscar/base/error.h"

namespace oscar {
namespace {

enum class Size { kNone, kVocab, kHidden, kIntermediate, kQueries, kKeys, kHeadDim, kExperts };

// Where a row of the table is asked for: outside the layers, in one of them, or in one expert.
struct Place {
  const ModelConfig& config;
  const LayerSpec* layer = nullptr;
  int layer_index = 0, expert = -1;
};

using Condition = bool (*)(const Place&);
constexpr Condition kAlways = [](const Place&) { return true; };
constexpr Condition kUntied = [](const Place& p) { return !p.config.tie_word_embeddings; };
constexpr Condition kQkvBias = [](const Place& p) { return p.layer->attention.qkv_bias; };
constexpr Condition kWithOBias = [](const Place& p) { return p.layer->attention.o_bias; };
constexpr Condition kQkNorm = [](const Place& p) { return p.layer->attention.qk_norm; };
constexpr Condition kInputNormsOnly = [](const Place& p) { return !p.layer->output_norms; };
constexpr Condition kOutputNorms = [](const Place& p) { return p.layer->output_norms; };
constexpr Condition kMlpBias = [](const Place& p) {
  return std::get<DenseSpec>(p.layer->mlp).bias;
};
constexpr Condition kChoiceBias = [](const Place& p) { return p.layer->experts()->choice_bias; };

struct Row {
  WeightRole role;
  const char* name;       // the first {} stands for the layer, the second for the expert
  const char* gguf_name;  // in GGUF files; null: not read from them
  Size rows, cols;
  Condition required;
};

using enum WeightRole;
using enum Size;
constexpr Row kModelRows[] = {
    {kEmbedding, "model.embed_tokens.weight", "token_embd.weight", kVocab, kHidden, kAlways},
    {kFinalNorm, "model.norm.weight", "output_norm.weight", kHidden, kNone, kAlways},
    {kOutput, "lm_head.weight", "output.weight", kVocab, kHidden, kUntied},
};
constexpr Row kAttentionRows[] = {
    {kAttentionNorm, "model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", kHidden,
     kNone, kAlways},
    {kQ, "model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", kQueries, kHidden,
     kAlways},
    {kK, "model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", kKeys, kHidden,
     kAlways},
    {kV, "model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight", kKeys, kHidden,
     kAlways},
    {kQBias, "model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias", kQueries, kNone,
     kQkvBias},
    {kKBias, "model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias", kKeys, kNone, kQkvBias},
    {kVBias, "model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias", kKeys, kNone, kQkvBias},
    {kQNorm, "model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight", kHeadDim,
     kNone, kQkNorm},
    {kKNorm, "model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight", kHeadDim,
     kNone, kQkNorm},
    {kO, "model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", kHidden, kQueries,
     kAlways},
    {kOBias, "model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias", kHidden, kNone,
     kWithOBias},
    {kMlpNorm, "model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight", kHidden,
     kNone, kInputNormsOnly},
};
// Of layers with norms behind attention and the MLP as well.
constexpr Row kOutputNormRows[] = {
    {kAttentionOutputNorm, "model.layers.{}.post_attention_layernorm.weight", nullptr, kHidden,
     kNone, kOutputNorms},
    {kMlpNorm, "model.layers.{}.pre_feedforward_layernorm.weight", nullptr, kHidden, kNone,
     kOutputNorms},
    {kMlpOutputNorm, "model.layers.{}.post_feedforward_layernorm.weight", nullptr, kHidden, kNone,
     kOutputNorms},
};
constexpr Row kDenseRows[] = {
    {kGate, "model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight", kIntermediate,
     kHidden, kAlways},
    {kUp, "model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight", kIntermediate, kHidden,
     kAlways},
    {kDown, "model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight", kHidden,
     kIntermediate, kAlways},
    {kGateBias, "model.layers.{}.mlp.gate_proj.bias", "blk.{}.ffn_gate.bias", kIntermediate, kNone,
     kMlpBias},
    {kUpBias, "model.layers.{}.mlp.up_proj.bias", "blk.{}.ffn_up.bias", kIntermediate, kNone,
     kMlpBias},
    {kDownBias, "model.layers.{}.mlp.down_proj.bias", "blk.{}.ffn_down.bias", kHidden, kNone,
     kMlpBias},
};

constexpr Row kRouterRows[] = {
    {kRouter, "model.layers.{}.mlp.gate.weight", nullptr, kExperts, kHidden, kAlways},
    {kRouterChoiceBias, "model.layers.{}.mlp.gate.e_score_correction_bias", nullptr, kExperts,
     kNone, kChoiceBias},
};
constexpr Row kExpertRows[] = {
    {kExpertGate, "model.layers.{}.mlp.experts.{}.gate_proj.weight", nullptr, kIntermediate,
     kHidden, kAlways},
    {kExpertUp, "model.layers.{}.mlp.experts.{}.up_proj.weight", nullptr, kIntermediate, kHidden,
     kAlways},
    {kExpertDown, "model.layers.{}.mlp.experts.{}.down_proj.weight", nullptr, kHidden,
     kIntermediate, kAlways},
};
constexpr Row kSharedRows[] = {
    {kGate, "model.layers.{}.mlp.shared_experts.gate_proj.weight", nullptr, kIntermediate, kHidden,
     kAlways},
    {kUp, "model.layers.{}.mlp.shared_experts.up_proj.weight", nullptr, kIntermediate, kHidden,
     kAlways},
    {kDown, "model.layers.{}.mlp.shared_experts.down_proj.weight", nullptr, kHidden, kIntermediate,
     kAlways},
};

int64_t extent(const Place& place, Size size) {
  const ModelConfig& config = place.config;
  switch (size) {
    case kVocab:
      return config.vocab_size;
    case kHidden:
      return config.hidden_size;
    case kIntermediate:
      return place.expert >= 0 ? place.layer->experts()->intermediate_size
                               : place.layer->dense_intermediate_size();
    case kQueries:
      return int64_t{config.num_qo_heads} * config.head_dim;
    case kKeys:
      return int64_t{config.num_kv_heads} * config.head_dim;
    case kHeadDim:
      return config.head_dim;
    case kExperts:
      return place.layer->experts()->num_experts;
    case kNone:
      break;
  }
  return 0;
}

bool is_norm(WeightRole role) {
  return role == kFinalNorm || role == kAttentionNorm || role == kAttentionOutputNorm ||
         role == kMlpNorm || role == kMlpOutputNorm || role == kQNorm || role == kKNorm;
}

template <size_t n>
void resolve(const Row (&rows)[n], const Place& place, std::vector<WeightSpec>& specs) {
  for (const Row& row : rows) {
    if (!row.required(place)) continue;
    WeightSpec spec{row.role,
                    fmt::format(fmt::runtime(row.name), place.layer_index, place.expert),
                    {},
                    place.expert,
                    is_norm(row.role) ? place.config.norm_offset : 0.0};
    for (const Size size : {row.rows, row.cols}) {
      if (size != kNone) spec.shape.push_back(extent(place, size));
    }
    specs.push_back(std::move(spec));
  }
}

// Buffers that old checkpoints store and that follow from config.json, and a tied output matrix
// that is stored twice.
bool redundant(const std::string& name, const ModelConfig& config) {
  const std::string buffer = ".rotary_emb.inv_freq";
  return (name.size() > buffer.size() &&
          name.compare(name.size() - buffer.size(), buffer.size(), buffer) == 0) ||
         (name == "lm_head.weight" && config.tie_word_embeddings);
}

}  // namespace

std::vector<WeightNames> weight_names(int num_layers) {
  std::vector<WeightNames> names;
  const auto add = [&names](const Row& row, int layer) {
    names.push_back({row.role, fmt::format(fmt::runtime(row.name), layer),
                     fmt::format(fmt::runtime(row.gguf_name), layer)});
  };
  for (const Row& row : kModelRows) add(row, 0);
  for (int layer = 0; layer < num_layers; ++layer) {
    for (const Row& row : kAttentionRows) add(row, layer);
    for (const Row& row : kDenseRows) add(row, layer);
  }
  return names;
}

std::vector<WeightSpec> model_weights(const ModelConfig& config) {
  std::vector<WeightSpec> specs;
  resolve(kModelRows, {config}, specs);
  return specs;
}

std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) {
  std::vector<WeightSpec> specs;
  Place place{config, &config.layer(layer), layer};
  resolve(kAttentionRows, place, specs);
  resolve(kOutputNormRows, place, specs);
  const ExpertsSpec* experts = place.layer->experts();
  if (experts == nullptr) {
    resolve(kDenseRows, place, specs);
    return specs;
  }
  resolve(kRouterRows, place, specs);
  if (experts->shared_intermediate_size > 0) resolve(kSharedRows, place, specs);
  for (place.expert = 0; place.expert < experts->num_experts; ++place.expert) {
    resolve(kExpertRows, place, specs);
  }
  return specs;
}

std::vector<std::string> further_weights(const ModelConfig& config, const WeightSource& weights) {
  std::vector<std::string> found;
  if (config.further_layers == 0) return found;
  std::vector<std::string> prefixes;
  for (int i = 0; i < config.further_layers; ++i) {
    prefixes.push_back(fmt::format("model.layers.{}.", config.num_layers + i));
  }
  for (std::string& name : weights.names()) {
    const auto starts = [&](const std::string& prefix) { return name.starts_with(prefix); };
    if (std::ranges::any_of(prefixes, starts)) found.push_back(std::move(name));
  }
  return found;
}

std::string left_out_note(const ModelConfig& config, const WeightSource& weights) {
  const size_t count = further_weights(config, weights).size();
  if (count == 0) return "";
  return fmt::format("left out the tensors ({}) of layers that guess tokens further ahead", count);
}

void check_weights(const ModelConfig& config, const WeightSource& weights) {
  std::set<std::string> expected;
  const auto check = [&](const std::vector<WeightSpec>& specs) {
    for (const WeightSpec& spec : specs) {
      weights.get(spec.name, spec.shape);
      expected.insert(spec.name);
    }
  };
  check(model_weights(config));
  for (int layer = 0; layer < config.num_layers; ++layer) check(layer_weights(config, layer));
  for (std::string& name : further_weights(config, weights)) expected.insert(std::move(name));
  for (const std::string& name : weights.names()) {
    if (!expected.contains(name) && !redundant(name, config)) {
      throw Error(
          {.what = "the checkpoint holds a tensor that its configuration does not account for",
           .where = weights.place(name),
           .expected = "the tensors of " + config.architecture,
           .hint = "leaving it out would change what the model computes"});
    }
  }
}

}  // namespace oscar
