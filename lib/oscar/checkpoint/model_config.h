// A decoder-only transformer as its config.json describes it, whatever the family.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/checkpoint/layer_spec.h"
#include "oscar/checkpoint/quantization_config.h"
#include "oscar/checkpoint/rope.h"

namespace oscar {

struct ModelConfig {
  std::string architecture;  // first entry of "architectures", for example "Qwen3ForCausalLM"
  std::string model_type;    // as in config.json, for example "qwen3"
  int num_layers = 0;
  int hidden_size = 0;
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int vocab_size = 0;
  double rms_norm_eps = 1e-6;
  double norm_offset = 0;      // added to the weights of all norms, in fp32
  double embedding_scale = 1;  // factor on the embeddings, rounded to the compute dtype
  double sm_scale = 1;         // factor on the scores before softmax
  bool tie_word_embeddings = false;
  std::vector<LayerSpec> layers;  // [num_layers]
  // Layers behind those, which guess tokens further ahead: their tensors are left out.
  int further_layers = 0;
  Rope rope;
  std::optional<Rope> local_rope;  // of layers whose AttentionSpec is local
  std::vector<int32_t> eos_token_ids;
  std::optional<int32_t> bos_token_id;
  std::optional<Fp8Layout> fp8;  // of a folder whose matrices are stored in FP8
  Json raw;                      // the file as read

  const LayerSpec& layer(int index) const { return layers.at(static_cast<size_t>(index)); }
  const Rope& rope_of(int index) const { return layer(index).attention.local ? *local_rope : rope; }
  // Layers with statistics and transforms: those that are not local.
  int num_fitted_layers() const;
  // Layers with equal specs together, in the order of the first of each.
  std::vector<std::vector<int>> layers_by_spec() const;
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
