// What sets the supported families apart: their defaults in transformers, and which keys of
// config.json each one reads. A new family is a new row here, plus keys it reads.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "oscar/base/json.h"

namespace oscar {

// Where the projections of attention have a bias.
enum class AttentionBias { kNone, kQkv, kByKey };  // kByKey: q, k, v and o, if attention_bias

// How a family chooses the layers with a sliding window.
enum class WindowRule {
  kNone,
  kByFlag,  // use_sliding_window, then layer_types or layers from max_window_layers on
  kAll,     // every layer, unless sliding_window is null
};

// Defaults are transformers' for absent keys; nullopt follows from other keys.
struct ModelFamily {
  std::string_view architecture, model_type;
  int vocab_size, hidden_size, intermediate_size, num_layers, num_qo_heads;
  std::optional<int> num_kv_heads;  // absent: num_qo_heads
  std::optional<int> head_dim;      // absent: hidden_size / num_qo_heads
  int max_position_embeddings;
  AttentionBias attention_bias;
  bool mlp_bias_key;  // reads mlp_bias
  bool qk_norm;
  WindowRule window_rule;
  std::optional<int> bos_token_id, eos_token_id;
};

// The family of an architecture, or null.
const ModelFamily* find_family(std::string_view architecture);
const ModelFamily* find_family_by_type(std::string_view model_type);
std::vector<std::string_view> supported_architectures();

// Throws Error for the first key of `config` that is neither read for this family nor known to
// leave the computation alone. Null counts as absent.
void check_config_keys(const Json& config, const ModelFamily& family, const std::string& source);

}  // namespace oscar
