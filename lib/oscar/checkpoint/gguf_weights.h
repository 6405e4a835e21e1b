// The weights of a GGUF model under the names of weight_table.h, dequantized when they are read.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "oscar/checkpoint/model_config.h"
#include "oscar/io/gguf.h"
#include "oscar/io/weight_source.h"

namespace oscar {

// Numbers stored as BF16, F16 and F32 are given as they lie in the file; others, and the rows of q
// and k that a converter has put into another order, are decoded to fp32.
class GgufWeights : public WeightSource {
 public:
  // `config` is that of the file (gguf_config.h). Tensors that the table does not name keep their
  // own names.
  GgufWeights(std::shared_ptr<const GgufFile> file, const ModelConfig& config);

  bool contains(const std::string& name) const override;
  TensorView get(const std::string& name, const std::vector<int64_t>& shape) const override;
  StoredBytes stored_bytes(const std::string& name) const override;
  std::vector<std::string> names() const override;
  std::vector<std::filesystem::path> shards() const override;
  std::string place(const std::string& name) const override;
  std::string quantization() const override;
  std::string fingerprint(bool all_bytes) const override;

 private:
  struct Entry {
    std::string gguf_name;
    const GgufTensor* tensor = nullptr;
    int paired_heads = 0;  // of q and k whose rows are stored in pairs; 0: rows in order
  };
  RowDecoder decoder(const Entry& entry) const;

  std::shared_ptr<const GgufFile> file_;
  std::map<std::string, Entry> entries_;
};

}  // namespace oscar
