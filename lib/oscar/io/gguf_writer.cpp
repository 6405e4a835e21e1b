// Header, metadata, a list of tensors, then their data, each at a multiple of 32 bytes.
#include "oscar/io/gguf_writer.h"

#include <cstring>

#include "oscar/base/atomic_file.h"

namespace oscar {
namespace {

constexpr uint32_t kVersionWritten = 3, kTypeUint32 = 4, kTypeString = 8, kTypeF32 = 0;
constexpr size_t kDataAlignment = 32;

template <typename T>
void append(std::string& bytes, T value) {
  char raw_bytes[sizeof value];
  std::memcpy(raw_bytes, &value, sizeof value);
  bytes.append(raw_bytes, sizeof value);
}

void append_text(std::string& bytes, const std::string& text) {
  append(bytes, uint64_t{text.size()});
  bytes += text;
}

void pad(std::string& bytes) {
  bytes.append((kDataAlignment - bytes.size() % kDataAlignment) % kDataAlignment, '\0');
}

}  // namespace

void write_gguf(const std::filesystem::path& path, const GgufMetadata& metadata,
                const FloatTensors& tensors) {
  std::string bytes = "GGUF", data;
  append(bytes, kVersionWritten);
  append(bytes, uint64_t{tensors.size()});
  append(bytes, uint64_t{metadata.size()});
  for (const auto& [key, value] : metadata) {
    append_text(bytes, key);
    if (const uint32_t* number = std::get_if<uint32_t>(&value)) {
      append(bytes, kTypeUint32);
      append(bytes, *number);
    } else {
      append(bytes, kTypeString);
      append_text(bytes, std::get<std::string>(value));
    }
  }
  for (const auto& [name, tensor] : tensors) {
    append_text(bytes, name);
    append(bytes, static_cast<uint32_t>(tensor.shape.size()));
    for (size_t i = tensor.shape.size(); i-- > 0;) {
      append(bytes, static_cast<uint64_t>(tensor.shape[i]));
    }
    append(bytes, kTypeF32);
    append(bytes, uint64_t{data.size()});
    data.append(reinterpret_cast<const char*>(tensor.values.data()),
                tensor.values.size() * sizeof(float));
    pad(data);
  }
  pad(bytes);
  write_file_atomically(path, bytes + data);
}

}  // namespace oscar
