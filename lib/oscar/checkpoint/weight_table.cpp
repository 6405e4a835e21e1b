// The table of tensor names.
#include "oscar/checkpoint/weight_table.h"

#include <fmt/format.h>

#include <set>

#include "oscar/base/error.h"

namespace oscar {
namespace {

enum class Size { kNone, kVocab, kHidden, kIntermediate, kQueries, kKeys, kHeadDim };

using Condition = bool (*)(const ModelConfig&);
constexpr Condition kAlways = [](const ModelConfig&) { return true; };
constexpr Condition kUntied = [](const ModelConfig& c) { return !c.tie_word_embeddings; };
constexpr Condition kQkvBias = [](const ModelConfig& c) { return c.qkv_bias; };
constexpr Condition kWithOBias = [](const ModelConfig& c) { return c.o_bias; };
constexpr Condition kMlpBias = [](const ModelConfig& c) { return c.mlp_bias; };
constexpr Condition kQkNorm = [](const ModelConfig& c) { return c.qk_norm; };

struct Row {
  WeightRole role;
  const char* name;       // {} stands for the layer
  const char* gguf_name;  // in GGUF files
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
constexpr Row kLayerRows[] = {
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
     kNone, kAlways},
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

int64_t extent(const ModelConfig& config, Size size) {
  switch (size) {
    case kVocab:
      return config.vocab_size;
    case kHidden:
      return config.hidden_size;
    case kIntermediate:
      return config.intermediate_size;
    case kQueries:
      return int64_t{config.num_qo_heads} * config.head_dim;
    case kKeys:
      return int64_t{config.num_kv_heads} * config.head_dim;
    case kHeadDim:
      return config.head_dim;
    case kNone:
      break;
  }
  return 0;
}

template <size_t n>
std::vector<WeightSpec> resolve(const Row (&rows)[n], const ModelConfig& config, int layer) {
  std::vector<WeightSpec> specs;
  for (const Row& row : rows) {
    if (!row.required(config)) continue;
    WeightSpec spec{row.role, fmt::format(fmt::runtime(row.name), layer), {}};
    for (const Size size : {row.rows, row.cols}) {
      if (size != kNone) spec.shape.push_back(extent(config, size));
    }
    specs.push_back(std::move(spec));
  }
  return specs;
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
    for (const Row& row : kLayerRows) add(row, layer);
  }
  return names;
}

std::vector<WeightSpec> model_weights(const ModelConfig& config) {
  return resolve(kModelRows, config, 0);
}

std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer) {
  return resolve(kLayerRows, config, layer);
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
