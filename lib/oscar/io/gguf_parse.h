// The walk over a GGUF file that fills a GgufFile.
#pragma once

#include <string>

#include "oscar/io/gguf.h"

namespace oscar {

// "uint32", "array".
const char* gguf_type_name(GgufType type);
// Bytes of one value; 0 for strings and arrays, which vary.
size_t gguf_type_bytes(GgufType type);

// Layout: "GGUF", u32 version, u64 tensors, u64 keys; each key as u64 length and bytes, u32 type,
// value; each tensor as name, u32 dimensions, u64 each (innermost first), u32 type, u64 offset of
// its data behind the header, which ends at the next multiple of the alignment.
struct GgufFile::Parser {
  explicit Parser(GgufFile& gguf) : gguf_(gguf), file_(gguf.file_) {}

  void parse();

 private:
  [[noreturn]] void refuse(const std::string& place, const std::string& what,
                           const std::string& expected = "", const std::string& found = "") const;
  size_t left() const { return file_.size() - position_; }
  const std::byte* take(size_t bytes, const std::string& place);
  template <typename T>
  T take(const std::string& place);
  std::string take_name(const char* kind, uint64_t number, size_t longest);
  GgufType take_type(const std::string& place);
  void skip_text(const std::string& place);
  void skip_elements(GgufType type, uint64_t count, int depth, const std::string& place);
  void read_value();
  void read_tensor(uint64_t number);
  size_t alignment() const;
  void place_tensors();

  GgufFile& gguf_;
  const MappedFile& file_;
  size_t position_ = 0;
  std::map<std::string, uint64_t> offsets_;  // of tensors' data, as written
};

}  // namespace oscar
