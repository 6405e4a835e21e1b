// GGUF files: parsed, copied with other tensors, written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "oscar/io/ggml_types.h"
#include "oscar/io/weight_source.h"

namespace oscar {

// One GGUF file by mmap: metadata and tensors, every count, length, type and offset checked.

// As numbered in the file.
enum class GgufType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64
};

struct GgufTensor {
  const GgmlType* type = nullptr;
  std::vector<int64_t> shape;  // outermost first, as torch has it: the file's order reversed
  const std::byte* data = nullptr;
  size_t bytes = 0;
};

// Versions 2 and 3, little-endian. Time and memory to open are linear in the metadata.
class GgufFile {
 public:
  // Throws Error naming file and key or tensor for anything but: a known version and byte order; at
  // most 65,536 keys and as many tensors; unique names; values of known types, arrays in arrays at
  // most once; alignment a power of two; tensors of known types whose rows are whole blocks, whose
  // sizes fit into 64 bits, and whose data lies in the file, aligned, without overlap, gaps or
  // rest.
  explicit GgufFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  bool has(const std::string& key) const { return values_.contains(key); }
  std::vector<std::string> keys() const;

  // Values by key; none when the key is absent. Throw Error when it is there with another type.
  // Strings stay valid as long as this object, and are the file's bytes: UTF-8 is not checked.
  std::optional<std::string_view> text(const std::string& key) const;
  std::optional<int64_t> integer(const std::string& key) const;  // of any width, up to 2^63 - 1
  // float32 as the decimal number of fewest digits that rounds to it: 1e-5 where 1e-5 was meant.
  std::optional<double> number(const std::string& key) const;
  // A number of any type, or 0 and 1 for false and true.
  std::optional<double> scalar(const std::string& key) const;
  std::optional<bool> flag(const std::string& key) const;
  std::optional<std::vector<std::string_view>> texts(const std::string& key) const;
  std::optional<std::vector<int64_t>> integers(const std::string& key) const;
  std::optional<std::vector<float>> floats(const std::string& key) const;

  // The bytes of a value as they lie in the file, for hashes; empty when the key is absent.
  std::string_view raw(const std::string& key) const;

  // All keys and values as they lie in the file, one behind another.
  std::string_view metadata() const { return metadata_; }
  // Of tensors' data, in bytes: a power of two.
  size_t alignment() const { return alignment_; }

  const std::map<std::string, GgufTensor>& tensors() const { return tensors_; }
  // In which tensors' data lie.
  const MappedFile& file() const { return file_; }

 private:
  struct Parser;
  static constexpr size_t kArrayHeaderBytes = 12;  // type of the elements, how many
  struct Value {
    GgufType type = GgufType::kUint8;
    GgufType element = GgufType::kUint8;  // of an array
    uint64_t count = 1;                   // elements of an array
    const std::byte* data = nullptr;      // of the value; of an array its header of 12 bytes
    size_t bytes = 0;
    const std::byte* elements() const { return data + kArrayHeaderBytes; }
  };

  const Value* find(const std::string& key) const;
  [[noreturn]] void refuse_type(const std::string& key, const char* expected) const;

  MappedFile file_;
  std::string_view metadata_;
  size_t alignment_ = 0;
  std::map<std::string, Value> values_;
  std::map<std::string, GgufTensor> tensors_;
};

// GGUF files of float32 tensors, written.

using GgufMetadata = std::vector<std::pair<std::string, std::variant<uint32_t, std::string>>>;

// Version 3, atomically; tensors in the order of names, shapes outermost first as everywhere here.
// Equal arguments give equal bytes.
void write_gguf(const std::filesystem::path& path, const GgufMetadata& metadata,
                const FloatTensors& tensors);

// A GGUF file written again with some of its tensors replaced and others added.

// The bytes to write for a tensor, as many as it has, or nothing to keep it as it is.
using GgufReplacement = std::function<std::optional<std::vector<std::byte>>(
    const std::string& name, const GgufTensor& tensor)>;

// Writes `to` with the keys and values of `from` byte by byte, its tensors in their order, as they
// were or as replaced, and behind them `added` as F32 in the order of names. Throws Error for a
// replacement of another size, an added tensor whose name is taken or too long, or when `to` cannot
// be written.
void copy_gguf(const GgufFile& from, const std::filesystem::path& to,
               const GgufReplacement& replacement, const FloatTensors& added);

// Mapped files that are cut short while they are in use: reading behind their new end raises
// SIGBUS.

// From now on SIGBUS in a named map ends the program with the name of the file and exit code 1, in
// place of a crash without a word.
void install_cut_file_handler();

// `path` must live until the map is forgotten. Of more than 1024 maps some have no name.
void name_map(const std::byte* begin, size_t bytes, const char* path);
void forget_map(const std::byte* begin);

}  // namespace oscar
