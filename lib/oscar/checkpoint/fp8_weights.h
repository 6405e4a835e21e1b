// The weights of a folder whose matrices are stored in FP8 with scales beside them.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "oscar/checkpoint/quantization_config.h"
#include "oscar/io/safetensors.h"
#include "oscar/io/weight_source.h"

namespace oscar {

// FP8 matrices are given as codes and scales (TensorView::fp8), other tensors as they lie in the
// file. Scales have no name of their own here.
class Fp8Weights : public WeightSource {
 public:
  // Throws Error for an FP8 tensor without scales, with two tensors of them, of a module that the
  // configuration leaves out or that is no matrix; for scales of other than an FP8 tensor; for
  // scales whose shape or type do not fit; and when nothing is stored in FP8.
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

}  // namespace oscar
