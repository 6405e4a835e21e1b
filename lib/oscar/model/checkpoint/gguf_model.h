// A model in a GGUF file: its config and its weights.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/io/gguf.h"
#include "oscar/io/weight_source.h"
#include "oscar/model/checkpoint/config.h"

namespace oscar {

// The configuration of a GGUF model, in the words of config.json.

// What config.json would say of this model, for parse_model_config. Architectures llama, qwen2 and
// qwen3; RoPE scaling none, linear, yarn, and that of the tensor rope_freqs.weight, which is given
// back as "llama3" where that is what it holds and as "freq_factors" else. Throws Error for another
// architecture, for a key that would change the computation and is not implemented or not known
// (named), and for a value of another type.
Json gguf_config(const GgufFile& file);

// The tensor that holds a factor on the wavelength of each pair of dimensions; part of the
// configuration, no weight of the model.
inline constexpr const char* kGgufRopeFactors = "rope_freqs.weight";

// Endings of tensors that hold a layer's rotations for OSCAR's branch of llama.cpp; no weights.
inline constexpr const char *kGgufKeyRotation = ".attn_k_rot.weight",
                            *kGgufValueRotation = ".attn_v_rot.weight";
bool is_gguf_rotation(std::string_view name);

// Whether rows of q and k are stored as neighbouring pairs (2i, 2i + 1) of a head's dimensions
// where config.json's models have halves (i, i + head_dim / 2).
bool has_paired_rows(const GgufFile& file);

// The weights of a GGUF model under the names of weights.h, dequantized when they are read.

// Numbers stored as BF16, F16 and F32 are given as they lie in the file; others, and the rows of q
// and k that a converter has put into another order, are decoded to fp32.
class GgufWeights : public WeightSource {
 public:
  // `config` is that of the file. Tensors that the table does not name keep their
  // own names; rotations are left out, also of the fingerprint.
  GgufWeights(std::shared_ptr<const GgufFile> file, const ModelConfig& config);

  bool contains(const std::string& name) const override;
  TensorView get(const std::string& name, const std::vector<int64_t>& shape) const override;
  StoredBytes stored_bytes(const std::string& name) const override;
  std::vector<std::string> names() const override;
  std::vector<std::filesystem::path> shards() const override;
  std::string place(const std::string& name) const override;
  std::string quantization() const override;
  std::string fingerprint(bool all_bytes) const override;
  // Tensors of rotations that are left out.
  size_t num_rotations() const { return num_rotations_; }

 private:
  struct Entry {
    std::string gguf_name;
    const GgufTensor* tensor = nullptr;
    int paired_heads = 0;  // of q and k whose rows are stored in pairs; 0: rows in order
  };
  RowDecoder decoder(const Entry& entry) const;

  std::shared_ptr<const GgufFile> file_;
  std::map<std::string, Entry> entries_;
  size_t num_rotations_ = 0;
};

}  // namespace oscar
