// Pieces of a GGUF file as bytes, for what writes one.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

inline constexpr uint32_t kGgufVersionWritten = 3, kGgufF32 = 0;

template <typename T>
void append_gguf(std::string& bytes, T value) {
  char raw_bytes[sizeof value];
  std::memcpy(raw_bytes, &value, sizeof value);
  bytes.append(raw_bytes, sizeof value);
}

inline void append_gguf_text(std::string& bytes, const std::string& text) {
  append_gguf(bytes, uint64_t{text.size()});
  bytes += text;
}

// The next multiple of `alignment`.
inline uint64_t gguf_padded(uint64_t bytes, uint64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// The list of tensors, whose data lie one behind another.
class GgufTensorList {
 public:
  explicit GgufTensorList(size_t alignment) : alignment_(alignment) {}

  void add(const std::string& name, const std::vector<int64_t>& shape, uint32_t type,
           uint64_t bytes) {
    append_gguf_text(entries_, name);
    append_gguf(entries_, static_cast<uint32_t>(shape.size()));
    for (size_t i = shape.size(); i-- > 0;) append_gguf(entries_, static_cast<uint64_t>(shape[i]));
    append_gguf(entries_, type);
    append_gguf(entries_, end_);
    end_ = gguf_padded(end_ + bytes, alignment_);
    ++count_;
  }

  // The file up to the data, not padded: `keys` keys and their values, then the list.
  std::string header(uint64_t keys, std::string_view metadata) const {
    std::string bytes = "GGUF";
    append_gguf(bytes, kGgufVersionWritten);
    append_gguf(bytes, count_);
    append_gguf(bytes, keys);
    bytes += metadata;
    return bytes + entries_;
  }

 private:
  size_t alignment_;
  uint64_t end_ = 0, count_ = 0;
  std::string entries_;
};

}  // namespace oscar
