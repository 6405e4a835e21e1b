// Header first, then the data in the order of the file.
#include "oscar/io/safetensors_copy.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "oscar/base/error.h"

namespace oscar {

void copy_safetensors(const std::filesystem::path& from, const std::filesystem::path& to,
                      const TensorReplacement& replacement) {
  const MappedFile file(from);
  std::vector<TensorEntry> tensors = parse_safetensors_header(file);
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.offset < b.offset; });
  std::ofstream out(to, std::ios::binary);
  const auto write = [&](const std::byte* data, size_t bytes) {
    out.write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  };
  // Tensors cover all that follows the header.
  write(file.data(), tensors.empty() ? file.size() : tensors.front().offset);
  for (const TensorEntry& tensor : tensors) {
    const std::byte* data = file.data() + tensor.offset;
    const auto replaced = replacement(tensor);
    if (replaced && replaced->size() != tensor.bytes) {
      throw Error({.what = "a tensor would change its size",
                   .where = fmt::format("{}: {}", from.string(), tensor.name),
                   .expected = fmt::format("{} bytes", tensor.bytes),
                   .found = fmt::format("{} bytes", replaced->size())});
    }
    write(replaced ? replaced->data() : data, tensor.bytes);
    file.release(data, tensor.bytes);
  }
  out.close();
  if (!out) {
    throw Error({.what = "cannot write weights",
                 .where = to.string(),
                 .hint = "is there space left on the disk?"});
  }
}

}  // namespace oscar
