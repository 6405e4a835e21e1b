// Weights of a folder by the names of weights.h, whatever its files call them.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oscar/io/safetensors.h"
#include "oscar/io/weight_source.h"
#include "oscar/model/checkpoint/config.h"

namespace oscar {

// Tensors that are called otherwise (StoredNames), that hold the rows of several matrices one after
// another, or the matrices of all experts. Those of left-out parts have no name here.
//   X.qkv_proj.weight          [q rows + k rows + v rows, hidden], where StoredNames says fused
//   X.mlp.gate_up_proj.weight  [gate rows + up rows, hidden], likewise
//   X.mlp.experts.gate_up_proj [num_experts, gate rows + up rows, hidden]
//   X.mlp.experts.down_proj    [num_experts, hidden, intermediate]
// The matrices of experts may all be stored transposed: the shapes of a layer's two tensors tell.
class NamedWeights : public WeightSource {
 public:
  // `files`: what the folder holds; `weights`: the same with scales in their place (Fp8Weights), or
  // `files` again. Throws Error for two tensors that stand for one weight, and for joined ones of
  // other shapes than `config` asks for.
  NamedWeights(std::shared_ptr<const SafetensorsWeights> files,
               std::shared_ptr<const WeightSource> weights, const ModelConfig& config);

  bool contains(const std::string& name) const override { return parts_.contains(name); }
  // Throws Error as its sources do, and where a block of FP8 lies across two matrices.
  TensorView get(const std::string& name, const std::vector<int64_t>& shape) const override;
  // Of a transposed matrix all that its expert has in the tensor.
  StoredBytes stored_bytes(const std::string& name) const override;
  std::vector<std::string> names() const override;
  std::vector<std::filesystem::path> shards() const override { return weights_->shards(); }
  std::string place(const std::string& name) const override;
  std::string quantization() const override { return weights_->quantization(); }
  std::string fingerprint(bool all_bytes) const override {
    return weights_->fingerprint(all_bytes);
  }
  std::optional<std::string> stored_name(const std::string& name) const override;

  // Whether no tensor is called, joined or left out otherwise than weights.h has it.
  bool changes_nothing() const { return changes_nothing_; }

 private:
  // Where a weight lies: a whole tensor, or rows of one matrix of it.
  struct Part {
    std::string stored;
    std::vector<int64_t> stored_shape = {};  // empty: the whole tensor
    int64_t matrix = 0, first_row = 0, rows = 0;
    bool transposed = false;
  };
  // A tensor that holds several weights: [rows, columns], or that of every expert.
  struct JoinedTensor {
    std::vector<std::pair<std::string, Part>> weights = {};
    int64_t matrices = 0, rows = 0, columns = 0;
    bool of_experts = false;
    std::vector<int64_t> shape(bool transposed) const;
  };
  void find_names(const ModelConfig& config);
  void find_rows(const ModelConfig& config, int layer);
  bool is_transposed(const std::map<std::string, JoinedTensor>& joined) const;

  std::shared_ptr<const SafetensorsWeights> files_;
  std::shared_ptr<const WeightSource> weights_;
  std::map<std::string, Part> parts_;  // by the names of weights.h
  bool changes_nothing_ = true;
};

// `weights` under the names of weights.h: as they are where they have them.
std::shared_ptr<const WeightSource> by_table_names(
    const std::shared_ptr<const SafetensorsWeights>& files,
    const std::shared_ptr<const WeightSource>& weights, const ModelConfig& config);

// Names of the tensors that no text passes through (StoredNames::other_parts).
std::vector<std::string> weights_of_other_parts(const ModelConfig& config,
                                                const WeightSource& weights);

}  // namespace oscar
