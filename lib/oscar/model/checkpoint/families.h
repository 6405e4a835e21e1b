// What each family has of its own: names in its config and of its tensors.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/model/checkpoint/config.h"

namespace oscar {

// What sets the supported families apart: their defaults in transformers, the keys of config.json
// that each one reads, and what its layers are. A new family is a function and a
// line in the list of families.cpp.

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
  // Parts of RoPE belong to places in images: of text, whose three positions are one, it is plain.
  bool multi_axis_rope = false;
  // RoPE's parameters say by what queries grow with their position (QueryScaling).
  bool scales_queries = false;
  bool tie_word_embeddings = false;
  std::optional<int> bos_token_id = std::nullopt, eos_token_id = std::nullopt;
  StoredNames stored_names = {};
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

// Keys and values of a config.json, or of an object in it.
struct ConfigKeys {
  Json json;
  std::string source, prefix;  // for messages: the file, and "text_config." or nothing
  bool of_text = true;         // false: beside a text_config, which has the keys of the family
};

// The way to a model that is not supported, or why it may never be; empty where neither is known.
const char* hint_for_unsupported(const ConfigReader& reader);

// Throws Error for keys of all `configs` that are neither read for this family nor known to leave
// the computation alone; it names all of them. Null counts as absent.
void check_config_keys(const std::vector<ConfigKeys>& configs, const ModelFamily& family);

// The supported families, and what several of them read alike.

extern const ModelFamily kQwen3, kQwen2, kQwen3Moe, kLlama, kMistral, kMinistral3, kGlm4Moe,
    kGemma3, kSeedOss, kPhi3, kHyV3, kMiniMaxM2, kQwen3Next, kQwen3_5, kQwen3_5Moe;
extern const ModelFamily kQwen3Vl, kQwen3VlMoe;  // text halves: they are no models of their own

// `config`'s layers, all with this attention and a dense MLP of intermediate_size.
std::vector<LayerSpec> dense_layers(const ConfigReader& reader, const ModelConfig& config,
                                    const AttentionSpec& attention, int default_intermediate_size,
                                    bool mlp_bias = false);

// A number up to kMaxExperts under either of two names: transformers 5 writes some keys anew.
int read_one_of(const ConfigReader& reader, const std::string& key, const std::string& other,
                int fallback);

// Throws Error where a key is there, not null, and says other than `value`.
void require_value(const ConfigReader& reader, const std::string& key, const Json& value,
                   const std::string& what);

// Experts of Qwen's MoE models in the layers that have them; `usual` says what absent keys mean.
void add_qwen_experts(const ConfigReader& reader, const ExpertsSpec& usual, ModelConfig& config);

// Throws Error where more experts are chosen than may be.
void require_enough_experts(const ConfigReader& reader, const ExpertsSpec& experts);

// sliding_window: `fallback` where the key is absent, 0 where it is null.
int read_window(const ConfigReader& reader, int fallback);

// The kind of every layer from layer_types; empty where the key is absent.
std::vector<AttentionKind> read_layer_types(const ConfigReader& reader, int num_layers);

// Throws Error where layer_types says other than that all layers are of this kind.
void require_one_layer_type(const ConfigReader& reader, int num_layers, AttentionKind kind);

}  // namespace oscar
