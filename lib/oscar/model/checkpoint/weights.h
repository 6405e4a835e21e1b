// Weights by their role in a layer, FP8 with its scales included.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "oscar/io/safetensors.h"
#include "oscar/io/weight_source.h"
#include "oscar/model/checkpoint/config.h"

namespace oscar {

// The weights of a folder whose matrices are stored in FP8 with scales beside them.

// FP8 matrices are given as codes and scales (TensorView::fp8), other tensors as they lie in the
// file. Scales have no name of their own here.
class Fp8Weights : public WeightSource {
 public:
  // Throws Error for an FP8 tensor without scales, with two tensors of them, of a module that the
  // configuration leaves out or that is no matrix; for scales of other than an FP8 tensor; for
  // scales whose shape or type do not fit; and when nothing is stored in FP8. With a layout of
  // kNone weights are as in any checkpoint, and only scales of other things are taken away.
  Fp8Weights(std::shared_ptr<const SafetensorsWeights> files, Fp8Layout layout);

  bool contains(const std::string& name) const override;
  // Throws Error, as SafetensorsWeights does, and for a scale that is no positive number.
  TensorView get(const std::string& name, const std::vector<int64_t>& shape) const override;
  StoredBytes stored_bytes(const std::string& name) const override {
    return files_->stored_bytes(name);
  }
  std::vector<std::string> names() const override;
  std::vector<std::filesystem::path> shards() const override { return files_->shards(); }
  std::string place(const std::string& name) const override { return files_->place(name); }
  std::string quantization() const override;
  // How many scales of activations or of the cache are not used, in words; empty where none are.
  std::string unused_scales() const;
  std::string fingerprint(bool all_bytes) const override { return files_->fingerprint(all_bytes); }

 private:
  std::string find_scale(const std::string& weight) const;
  void check_scale(const std::string& weight, const std::string& scale) const;
  std::vector<int64_t> grid(const std::vector<int64_t>& shape) const;

  std::shared_ptr<const SafetensorsWeights> files_;
  Fp8Layout layout_;
  std::map<std::string, std::string> scales_;  // FP8 tensor -> its scales
  std::set<std::string> hidden_;               // scales, of weights or of anything else
};

// Whether there are scales of activations or of the cache among the tensors.
bool has_other_scales(const WeightSource& weights);

// The tensors of a decoder-only transformer: role, name in the file, shape and when it exists.
// One table for all families; a family with other names or further roles adds rows.

enum class WeightRole {
  kEmbedding,      // [vocab, hidden]
  kFinalNorm,      // [hidden]
  kOutput,         // [vocab, hidden]; absent when tied to the embedding
  kAttentionNorm,  // [hidden], before attention
  kQ,  // [num_qo_heads * head_dim, hidden]; of a gated layer twice the rows: each head's queries,
       // then its gate
  kK,  // [num_kv_heads * head_dim, hidden]
  kV,  // [num_kv_heads * head_dim, hidden]
  kQBias,
  kKBias,
  kVBias,
  kQNorm,  // [head_dim], of a joint norm [num_qo_heads * head_dim]
  kKNorm,  // [head_dim], of a joint norm [num_kv_heads * head_dim]
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
  kSharedGate,  // [1, hidden]: what the shared expert is multiplied by the sigmoid of
  // Of Gated DeltaNet (DeltaNetSpec), its input projections part by part or head by head:
  kDeltaChannels,        // [channels, hidden]: q, k and v
  kDeltaZ,               // [value_rows, hidden]
  kDeltaBeta,            // [num_value_heads, hidden]
  kDeltaDecay,           // [num_value_heads, hidden]
  kDeltaChannelsByHead,  // [channels + value_rows, hidden]: of each key head q, k, v and z
  kDeltaSharesByHead,    // [2 * num_value_heads, hidden]: of each key head beta and decay
  kDeltaConvolution,     // [channels, 1, taps]
  kDeltaLogRate,         // [num_value_heads]
  kDeltaStepBias,        // [num_value_heads]
  kDeltaNorm,            // [value_dim]
  kDeltaOut,             // [hidden, value_rows]
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

// Names of the tensors of layers that guess tokens further ahead (ModelConfig::further_layers,
// StoredNames::further_part).
std::vector<std::string> further_weights(const ModelConfig& config, const WeightSource& weights);

}  // namespace oscar
