// Header, metadata, a list of tensors, then their data, each at a multiple of 32 bytes.
#include "oscar/io/gguf_writer.h"

#include "oscar/base/atomic_file.h"
#include "oscar/io/gguf.h"
#include "oscar/io/gguf_bytes.h"

namespace oscar {
namespace {

constexpr size_t kDataAlignment = 32;

void pad(std::string& bytes) { bytes.resize(gguf_padded(bytes.size(), kDataAlignment), '\0'); }

}  // namespace

void write_gguf(const std::filesystem::path& path, const GgufMetadata& metadata,
                const FloatTensors& tensors) {
  std::string values, data;
  for (const auto& [key, value] : metadata) {
    append_gguf_text(values, key);
    if (const uint32_t* number = std::get_if<uint32_t>(&value)) {
      append_gguf(values, static_cast<uint32_t>(GgufType::kUint32));
      append_gguf(values, *number);
    } else {
      append_gguf(values, static_cast<uint32_t>(GgufType::kString));
      append_gguf_text(values, std::get<std::string>(value));
    }
  }
  GgufTensorList list(kDataAlignment);
  for (const auto& [name, tensor] : tensors) {
    const size_t bytes = tensor.values.size() * sizeof(float);
    list.add(name, tensor.shape, kGgufF32, bytes);
    data.append(reinterpret_cast<const char*>(tensor.values.data()), bytes);
    pad(data);
  }
  std::string bytes = list.header(metadata.size(), values);
  pad(bytes);
  write_file_atomically(path, bytes + data);
}

}  // namespace oscar
