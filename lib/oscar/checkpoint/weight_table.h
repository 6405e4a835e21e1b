// The tensors of a decoder-only transformer: role, name in the file, shape and when it exists.
// One table for all families; a family with other names or further roles adds rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oscar/checkpoint/model_config.h"
#include "oscar/io/weight_source.h"

namespace oscar {

enum class WeightRole {
  kEmbedding,      // [vocab, hidden]
  kFinalNorm,      // [hidden]
  kOutput,         // [vocab, hidden]; absent when tied to the embedding
  kAttentionNorm,  // [hidden], before attention
  kQ,              // [num_qo_heads * head_dim, hidden]
  kK,              // [num_kv_heads * head_dim, hidden]
  kV,              // [num_kv_heads * head_dim, hidden]
  kQBias,
  kKBias,
  kVBias,
  kQNorm,  // [head_dim]
  kKNorm,  // [head_dim]
  kO,      // [hidden, num_qo_heads * head_dim]
  kOBias,
  kMlpNorm,  // [hidden], before the MLP
  kGate,     // [intermediate, hidden]
  kUp,       // [intermediate, hidden]
  kDown,     // [hidden, intermediate]
  kGateBias,
  kUpBias,
  kDownBias,
};

// One tensor that a model of this configuration has.
struct WeightSpec {
  WeightRole role;
  std::string name;
  std::vector<int64_t> shape;
};

// What a tensor is called in safetensors files (WeightSpec::name) and in GGUF files.
struct WeightNames {
  WeightRole role;
  std::string name, gguf_name;
};

// Every tensor that a model of so many layers may have, whatever its configuration.
std::vector<WeightNames> weight_names(int num_layers);

// Tensors outside the layers, and those of one layer.
std::vector<WeightSpec> model_weights(const ModelConfig& config);
std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer);

// Throws Error when a tensor of the table is missing or of another shape, or when the checkpoint
// holds a tensor that the table does not ask for: a bias or norm left out would go unnoticed.
void check_weights(const ModelConfig& config, const WeightSource& weights);

}  // namespace oscar
