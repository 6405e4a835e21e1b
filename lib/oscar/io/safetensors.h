// safetensors shards by mmap, every offset, shape and dtype checked before use.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "oscar/io/mapped_file.h"
#include "oscar/io/weight_source.h"

namespace oscar {

// The tensors of one or many shards, found by name.
class SafetensorsWeights : public WeightSource {
 public:
  // Opens model.safetensors.index.json or model.safetensors in `folder`. Throws Error for a missing
  // or truncated shard, overlapping or out-of-range offsets, sizes that disagree with the shape.
  // Tensors of dtypes other than Dtype are listed by name and refused when asked for.
  explicit SafetensorsWeights(const std::filesystem::path& folder);

  bool contains(const std::string& name) const override;
  // The view's data lies in the file as it is.
  TensorView get(const std::string& name, const std::vector<int64_t>& shape) const override;
  StoredBytes stored_bytes(const std::string& name) const override;
  std::vector<std::string> names() const override;
  std::vector<std::filesystem::path> shards() const override;
  std::string place(const std::string& name) const override;
  std::string fingerprint(bool all_bytes) const override;

  // A tensor as it lies in its file, of any dtype that the format has.
  struct Stored {
    std::string dtype;  // for example "F8_E4M3"
    std::vector<int64_t> shape;
    const std::byte* data = nullptr;
    size_t bytes = 0;
  };
  // Of one of names().
  Stored stored(const std::string& name) const;

 private:
  struct Entry;
  std::filesystem::path folder_;
  std::vector<std::shared_ptr<MappedFile>> files_;
  std::map<std::string, std::shared_ptr<Entry>> entries_;
};

}  // namespace oscar
