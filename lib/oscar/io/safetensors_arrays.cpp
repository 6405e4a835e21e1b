// Conversion to and from float32 behind the header of safetensors_header.h.
#include "oscar/io/safetensors_arrays.h"

#include <cstring>

#include "oscar/base/atomic_file.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/cache/numeric.h"
#include "oscar/io/safetensors_header.h"

namespace oscar {
namespace {

template <typename T, typename Convert>
void convert(const std::byte* data, size_t bytes, std::vector<float>& out, Convert&& to_float) {
  for (size_t at = 0; at < bytes; at += sizeof(T)) {
    T value;
    std::memcpy(&value, data + at, sizeof value);
    out.push_back(to_float(value));
  }
}

}  // namespace

FloatTensors read_safetensors(const std::filesystem::path& path) {
  const MappedFile file(path);
  FloatTensors tensors;
  for (const TensorEntry& entry : parse_safetensors_header(file)) {
    FloatTensor& tensor = tensors[entry.name];
    tensor.shape = entry.shape;
    const std::byte* data = file.data() + entry.offset;
    if (entry.dtype == "F32") {
      convert<float>(data, entry.bytes, tensor.values, [](float x) { return x; });
    } else if (entry.dtype == "F64") {
      convert<double>(data, entry.bytes, tensor.values,
                      [](double x) { return static_cast<float>(x); });
    } else if (entry.dtype == "F16") {
      convert<uint16_t>(data, entry.bytes, tensor.values, fp16_to_float);
    } else if (entry.dtype == "BF16") {
      convert<uint16_t>(data, entry.bytes, tensor.values, bf16_to_float);
    } else {
      throw Error({.what = "not a tensor of numbers that can be read",
                   .where = path.string() + ": " + entry.name,
                   .expected = "F64, F32, F16 or BF16",
                   .found = entry.dtype});
    }
  }
  return tensors;
}

void write_safetensors(const std::filesystem::path& path, const FloatTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const size_t begin = end;
    end += tensor.values.size() * sizeof(float);
    header[name] = {{"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(text.size() >> (8 * i) & 0xff);
  bytes += text;
  for (const auto& entry : tensors) {
    const std::vector<float>& values = entry.second.values;
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  }
  write_file_atomically(path, bytes);
}

}  // namespace oscar
