// Where weights are read from: files mapped into memory, tensors by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oscar/base/files.h"
#include "oscar/base/sha256.h"

namespace oscar {

// Arrays of numbers as files of other tools hold them.

// Row-major; `values` has the product of `shape` entries, one for a scalar.
struct FloatTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;

  bool operator==(const FloatTensor&) const = default;
};

using FloatTensors = std::map<std::string, FloatTensor>;

// Read-only memory maps of whole files.

// A read-only memory map. Throws Error when the file is missing or empty.
class MappedFile {
 public:
  explicit MappedFile(std::filesystem::path path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  const std::filesystem::path& path() const { return file_.path(); }
  // Copies bytes of the map by reading the file: for much that is needed once, faster than through
  // pages, above all from a disk. Throws Error when the file has become shorter.
  void read(const std::byte* begin, size_t bytes, std::byte* out) const;
  // Has the system read these bytes into its cache meanwhile, if it likes.
  void read_ahead(const std::byte* begin, size_t bytes) const;
  // Tells the kernel that these bytes are not needed again soon (weights already used).
  void release(const std::byte* begin, size_t bytes) const;

 private:
  InputFile file_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// What a model's weights are read from, whatever the file format: tensors by name, as numbers.

enum class Dtype { kBf16, kFp16, kFp32 };
size_t dtype_bytes(Dtype dtype);
const char* dtype_name(Dtype dtype);                      // "BF16", "F16", "F32", as in the file
float stored_float(Dtype dtype, const std::byte* place);  // of a number, aligned or not

// Writes rows first .. first + count - 1 of a tensor, seen as rows of its last dimension, as fp32
// in row-major order. Several threads may call it side by side.
using RowDecoder = std::function<void(int64_t first, int64_t count, float* out)>;

// A matrix of FP8 E4M3 codes (torch's float8_e4m3fn: no infinities, NaN is 0x7f and 0xff), one byte
// each. Element [r, c] is its code's value times scales[r / block_rows, c / block_columns] in fp32;
// the last blocks of both directions may be partial. The codes lie in TensorView::data, so that the
// device of a run can take them as they are.
struct BlockScales {
  std::vector<float> scales;  // [ceil(rows / block_rows), ceil(columns / block_columns)]
  int64_t block_rows = 0, block_columns = 0;
};

// One tensor of a source. It is valid as long as its source lives.
struct TensorView {
  std::string name;
  Dtype dtype = Dtype::kBf16;  // of `data` as numbers, or of what `decode` makes
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;  // mapped from the file; null: `decode` makes the numbers
  size_t bytes = 0;                 // in the file
  RowDecoder decode = {};           // of GGUF's blocks and of rows in another order
  std::shared_ptr<const BlockScales> fp8 = {};  // set: `data` holds FP8 codes
};

// Bytes of a tensor as they lie in a file, which its source keeps open. Several threads may use
// them side by side.
struct StoredBytes {
  const MappedFile* file = nullptr;
  const std::byte* begin = nullptr;
  size_t bytes = 0;

  // Copies `count` of them, from number `first` on. Throws Error when the file has been cut short.
  void read(size_t first, size_t count, std::byte* out) const {
    file->read(begin + first, count, out);
  }
  // Has the system read the first `count` of them meanwhile, if it likes.
  void read_ahead(size_t count) const {
    if (count > 0) file->read_ahead(begin, count);
  }
  // They are not needed again soon.
  void release() const { file->release(begin, bytes); }
};

// The tensors of a checkpoint under the names of weights.h.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  virtual bool contains(const std::string& name) const = 0;
  // Throws Error naming the tensor and its file when it is missing, of another shape or of a type
  // that cannot be loaded.
  virtual TensorView get(const std::string& name, const std::vector<int64_t>& shape) const = 0;
  // The bytes of a tensor, which are those of its view's data or what `decode` makes numbers of.
  // None where there is no tensor of this name.
  virtual StoredBytes stored_bytes(const std::string& name) const = 0;
  virtual std::vector<std::string> names() const = 0;
  virtual std::vector<std::filesystem::path> shards() const = 0;
  // "FILE: NAME", for error messages.
  virtual std::string place(const std::string& name) const = 0;
  // The name in its file of the tensor that is this weight; none where it is a part of one.
  virtual std::optional<std::string> stored_name(const std::string& name) const { return name; }
  // The types of quantized weights, most frequent first ("Q4_1 (210 tensors), F32 (61)"); empty
  // when the numbers are stored as they are.
  virtual std::string quantization() const { return ""; }

  // sha256 over every tensor's name, dtype, shape and first and last 4 KiB (all bytes with
  // `all_bytes`), in name order: independent of how the checkpoint is sharded.
  virtual std::string fingerprint(bool all_bytes) const = 0;
};

// Adds one tensor to a fingerprint.
void add_to_fingerprint(Sha256& digest, const std::string& name, const std::string& dtype,
                        const std::vector<int64_t>& shape, const StoredBytes& stored,
                        bool all_bytes);

}  // namespace oscar
