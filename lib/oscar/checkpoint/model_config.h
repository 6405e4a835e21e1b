// A decoder-only transformer as its config.json describes it, whatever the family.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/checkpoint/layer_geometry.h"
#include "oscar/checkpoint/rope.h"

namespace oscar {

struct ModelConfig {
  std::string architecture;  // first entry of "architectures", for example "Qwen3ForCausalLM"
  std::string model_type;    // "qwen3", "qwen2", "llama", "mistral"
  int num_layers = 0;
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int vocab_size = 0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;  // bias on the q, k and v projections
  bool o_bias = false;    // bias on the output projection
  bool mlp_bias = false;
  bool qk_norm = false;                        // RMSNorm over head_dim on q and k, before RoPE
  std::vector<AttentionKind> layer_attention;  // [num_layers]
  int sliding_window = 0;  // of sliding layers: a query sees this many keys, itself included
  Rope rope;
  std::vector<int32_t> eos_token_ids;
  std::optional<int32_t> bos_token_id;
  Json raw;  // the file as read

  // Geometry of one layer; `recent_tokens` decides whether a sliding layer is ever quantized.
  LayerGeometry geometry(int layer, int recent_tokens) const;
};

// Reads config.json as transformers 4 and 5 write it. Absent keys take the family's default in
// transformers. Throws Error for an unknown architecture, for a key that would change the
// computation and is not implemented (named), and for absurd or inconsistent sizes.
// `rope_scaling` replaces the file's rope_scaling when set (--rope-scaling).
ModelConfig parse_model_config(const Json& config, const std::string& source,
                               const std::optional<Json>& rope_scaling = std::nullopt);

}  // namespace oscar
