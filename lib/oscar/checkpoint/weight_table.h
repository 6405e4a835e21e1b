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
  kAttentionOutputNorm,  // [hidden], behind attention
  kMlpNorm,              // [hidden], before the MLP or the experts
  kMlpOutputNorm,        // [hidden], behind the MLP
  // Of the MLP, or of the expert that all tokens share:
  kGate,  // [intermediate, hidden]
  kUp,    // [intermediate, hidden]
  kDown,  // [hidden, intermediate]
  kGateBias,
  kUpBias,
  kDownBias,
  kRouter,            // [num_experts, hidden]
  kRouterChoiceBias,  // [num_experts]
  // Of each expert:
  kExpertGate,  // [intermediate, hidden]
  kExpertUp,    // [intermediate, hidden]
  kExpertDown,  // [hidden, intermediate]
};

// One tensor that a model of this configuration has.
struct WeightSpec {
  WeightRole role;
  std::string name;
  std::vector<int64_t> shape;
  int expert = -1;    // of kExpertGate, kExpertUp and kExpertDown
  double offset = 0;  // added to its values, which are then fp32 whatever the compute dtype is
};

// What a tensor is called in safetensors files (WeightSpec::name) and in GGUF files.
struct WeightNames {
  WeightRole role;
  std::string name, gguf_name;
};

// Every tensor that GGUF files of a model of so many layers may have, whatever its configuration.
std::vector<WeightNames> weight_names(int num_layers);

// Tensors outside the layers, and those of one layer.
std::vector<WeightSpec> model_weights(const ModelConfig& config);
std::vector<WeightSpec> layer_weights(const ModelConfig& config, int layer);

// Throws Error when a tensor of the table is missing or of another shape, or when the checkpoint
// holds a tensor that the table does not ask for: a bias or norm left out would go unnoticed. Those
// of further_weights are left alone.
void check_weights(const ModelConfig& config, const WeightSource& weights);

// Names of the tensors of layers that guess tokens further ahead (ModelConfig::further_layers).
std::vector<std::string> further_weights(const ModelConfig& config, const WeightSource& weights);

// A line that says how many those are; empty where there are none.
std::string left_out_note(const ModelConfig& config, const WeightSource& weights);

}  // namespace oscar
