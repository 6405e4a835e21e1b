// safetensors shards by mmap, every offset, shape and dtype checked before use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace oscar {

enum class Dtype { kBf16, kFp16, kFp32 };
size_t dtype_bytes(Dtype dtype);
const char* dtype_name(Dtype dtype);  // "BF16", "F16", "F32", as in the file

// One tensor inside a mapped file. `data` stays valid as long as its MappedFile lives.
struct TensorView {
  std::string name;
  Dtype dtype = Dtype::kBf16;
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;
  size_t bytes = 0;
};

// A read-only memory map. Throws Error when the file is missing or empty.
class MappedFile {
 public:
  explicit MappedFile(std::filesystem::path path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  const std::filesystem::path& path() const { return path_; }
  // Tells the kernel that these bytes are not needed again soon (weights already used).
  void release(const std::byte* begin, size_t bytes) const;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The tensors of one or many shards, found by name.
class WeightStore {
 public:
  // Opens model.safetensors.index.json or model.safetensors in `folder`. Throws Error for a missing
  // or truncated shard, overlapping or out-of-range offsets, sizes that disagree with the shape.
  // Tensors of dtypes other than Dtype are listed by name and refused when asked for.
  static WeightStore open(const std::filesystem::path& folder);

  bool contains(const std::string& name) const;
  // Throws Error naming the tensor and its folder when it is missing, of another shape or of a
  // dtype that cannot be loaded.
  TensorView get(const std::string& name, const std::vector<int64_t>& shape) const;
  void release(const TensorView& view) const;
  std::vector<std::string> names() const;
  std::vector<std::filesystem::path> shards() const;

  // sha256 over every tensor's name, dtype, shape and first and last 4 KiB (all bytes with
  // `all_bytes`), in name order: independent of how the checkpoint is sharded.
  std::string fingerprint(bool all_bytes) const;

 private:
  struct Entry;
  std::filesystem::path folder_;
  std::vector<std::shared_ptr<MappedFile>> files_;
  std::map<std::string, std::shared_ptr<Entry>> entries_;
};

}  // namespace oscar
