// What sets the supported families apart: their defaults in transformers, the keys of config.json
// that each one reads, and what its layers are. A new family is a file in families/ and a line in
// the list of model_family.cpp.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/checkpoint/config_reader.h"
#include "oscar/checkpoint/layer_spec.h"

namespace oscar {

struct ModelConfig;

// Defaults are transformers' for absent keys; nullopt follows from other keys.
struct ModelFamily {
  std::string_view architecture, model_type;
  int vocab_size, hidden_size, num_layers, num_qo_heads;
  std::optional<int> num_kv_heads;  // absent: num_qo_heads
  std::optional<int> head_dim;      // absent: hidden_size / num_qo_heads
  int max_position_embeddings;
  double rms_norm_eps = 1e-6;
  // Share of head_dim that RoPE turns, where the family may turn a part only.
  std::optional<double> rotary_factor = std::nullopt;
  double rope_theta = 10000.0;
  // Of the local layers, where the family has them with a RoPE of their own.
  std::optional<double> local_rope_theta = std::nullopt;
  // max_position_embeddings is what is served, whatever the scaling of the RoPE: servers multiply
  // that of other families (rope.h).
  bool length_is_scaled = false;
  bool tie_word_embeddings = false;
  std::optional<int> bos_token_id = std::nullopt, eos_token_id = std::nullopt;
  // Keys of config.json that are read for this family, beside those read for all.
  std::span<const std::string_view> keys;
  // Fills the layers of a model whose sizes have been read. Throws Error for values that fit no
  // layer.
  void (*build)(const ConfigReader& reader, ModelConfig& config);
};

// The family of an architecture, or null.
const ModelFamily* find_family(std::string_view architecture);
const ModelFamily* find_family_by_type(std::string_view model_type);
std::vector<std::string_view> supported_architectures();

// Throws Error for the first key of `config` that is neither read for this family nor known to
// leave the computation alone. Null counts as absent.
void check_config_keys(const Json& config, const ModelFamily& family, const std::string& source);

}  // namespace oscar
