// The header is made in memory, the data goes from file to file.
#include "oscar/io/gguf_copy.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "oscar/base/error.h"
#include "oscar/io/gguf_bytes.h"

namespace oscar {
namespace {

constexpr size_t kLongestTensorName = 63;  // ggml's, without the zero behind it

}  // namespace

void copy_gguf(const GgufFile& from, const std::filesystem::path& to,
               const GgufReplacement& replacement, const FloatTensors& added) {
  using Named = std::pair<const std::string, GgufTensor>;
  std::vector<const Named*> order;
  for (const Named& tensor : from.tensors()) order.push_back(&tensor);
  std::sort(order.begin(), order.end(),
            [](const Named* a, const Named* b) { return a->second.data < b->second.data; });
  GgufTensorList list(from.alignment());
  for (const Named* tensor : order) {
    const GgufTensor& t = tensor->second;
    list.add(tensor->first, t.shape, t.type->id, t.bytes);
  }
  for (const auto& [name, tensor] : added) {
    if (from.tensors().contains(name) || name.size() > kLongestTensorName) {
      throw Error({.what = "a tensor cannot be added to a GGUF file",
                   .where = from.path().string() + ": " + name,
                   .found = name.size() > kLongestTensorName ? "a name of over 63 bytes"
                                                             : "one of this name is there"});
    }
    list.add(name, tensor.shape, kGgufF32, tensor.values.size() * sizeof(float));
  }
  const std::string header = list.header(from.keys().size(), from.metadata());

  std::ofstream out(to, std::ios::binary);
  const auto write = [&](const void* data, size_t bytes) {
    out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
    const std::string zeros(gguf_padded(bytes, from.alignment()) - bytes, '\0');
    out.write(zeros.data(), static_cast<std::streamsize>(zeros.size()));
  };
  write(header.data(), header.size());
  for (const Named* tensor : order) {
    const auto& [name, t] = *tensor;
    const auto replaced = replacement(name, t);
    if (replaced && replaced->size() != t.bytes) {
      throw Error({.what = "a tensor would change its size",
                   .where = fmt::format("{}: {}", from.path().string(), name),
                   .expected = fmt::format("{} bytes", t.bytes),
                   .found = fmt::format("{} bytes", replaced->size())});
    }
    write(replaced ? replaced->data() : t.data, t.bytes);
    from.file().release(t.data, t.bytes);
  }
  for (const auto& [name, tensor] : added) {
    write(tensor.values.data(), tensor.values.size() * sizeof(float));
  }
  out.close();
  if (!out) {
    throw Error({.what = "cannot write a GGUF file",
                 .where = to.string(),
                 .hint = "is there space left on the disk?"});
  }
}

}  // namespace oscar
