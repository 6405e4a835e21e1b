// safetensors files: header, weights, arrays, copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oscar/io/weight_source.h"

namespace oscar {

// The header of one safetensors file, parsed and checked against the size of the file.

// One entry of the header; `offset` counts from the start of the file.
struct TensorEntry {
  std::string name;
  std::string dtype;  // as written, for example "BF16" or "F8_E4M3"
  std::vector<int64_t> shape;
  size_t offset = 0;
  size_t bytes = 0;
};

// Parses and checks the header of a mapped file: its length, unique names, integer shapes, sizes
// that match shape and dtype, and offsets that cover the data exactly, without gap or overlap.
// Throws Error naming file and tensor.
std::vector<TensorEntry> parse_safetensors_header(const MappedFile& file);

// safetensors shards by mmap, every offset, shape and dtype checked before use.

// The files that a folder's weights are read from: model.safetensors, else those that
// model.safetensors.index.json names, each once, whether they are there or not. Empty where the
// folder has neither. Throws Error for an index that names none, or a path elsewhere.
std::vector<std::filesystem::path> weight_files(const std::filesystem::path& folder);

// The tensors of one or many shards, found by name.
class SafetensorsWeights : public WeightSource {
 public:
  // Opens weight_files(folder). Throws Error for a missing or truncated shard, overlapping or
  // out-of-range offsets, sizes that disagree with the shape. Tensors of dtypes other than Dtype
  // are listed by name and refused when asked for.
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

// Whole safetensors files of numbers, read into memory and written.

// Every tensor, as float32. Throws Error naming file and tensor for a malformed file and for dtypes
// other than F64, F32, F16 and BF16.
FloatTensors read_safetensors(const std::filesystem::path& path);

// Atomically, as F32 in the order of names, the data at a multiple of 8 bytes. `metadata` becomes
// __metadata__. Equal tensors give equal bytes.
void write_safetensors(const std::filesystem::path& path, const FloatTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

// A safetensors file written again with some of its tensors replaced.

// The bytes to write for a tensor, as many as it has, or nothing to keep it as it is.
using TensorReplacement =
    std::function<std::optional<std::vector<std::byte>>(const TensorEntry& tensor)>;

// Writes `to` with the header of `from`, so that names, order, dtypes, shapes and metadata stay,
// and each tensor as it was or as replaced. Throws Error for a malformed `from`, a replacement of
// another size, or when `to` cannot be written.
void copy_safetensors(const std::filesystem::path& from, const std::filesystem::path& to,
                      const TensorReplacement& replacement);

}  // namespace oscar
