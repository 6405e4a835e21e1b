// GGUF files written by a test, right or wrong.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "oscar/io/gguf.h"

namespace oscar_test {

// The bytes of a number.
template <typename T>
std::string bytes_of(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

inline std::string gguf_text(const std::string& text) {
  return bytes_of(uint64_t{text.size()}) + text;
}

inline std::string gguf_type(oscar::GgufType type) { return bytes_of(static_cast<uint32_t>(type)); }

inline std::string gguf_array(oscar::GgufType type, uint64_t count, const std::string& elements) {
  return gguf_type(type) + bytes_of(count) + elements;
}

struct GgufTestTensor {
  std::string name;
  std::vector<uint64_t> dimensions;  // innermost first, as in the file
  uint32_t type = 0;
  uint64_t offset = 0;
};

// A file in the making: every field may be set to something wrong before bytes() is asked for.
struct GgufBuilder {
  uint32_t version = 3;
  std::vector<std::string> values;  // key, type and value
  std::vector<GgufTestTensor> tensors;
  std::string data;
  uint64_t alignment = 32;
  int64_t extra_values = 0, extra_tensors = 0;  // beyond what is there, in the header's counts

  GgufBuilder& add(const std::string& key, oscar::GgufType type, const std::string& value) {
    values.push_back(gguf_text(key) + gguf_type(type) + value);
    return *this;
  }
  GgufBuilder& text(const std::string& key, const std::string& value) {
    return add(key, oscar::GgufType::kString, gguf_text(value));
  }
  GgufBuilder& integer(const std::string& key, uint32_t value) {
    return add(key, oscar::GgufType::kUint32, bytes_of(value));
  }
  GgufBuilder& number(const std::string& key, float value) {
    return add(key, oscar::GgufType::kFloat32, bytes_of(value));
  }
  GgufBuilder& flag(const std::string& key, bool value) {
    return add(key, oscar::GgufType::kBool, std::string(1, value ? '\1' : '\0'));
  }
  GgufBuilder& texts(const std::string& key, const std::vector<std::string>& list) {
    std::string elements;
    for (const std::string& entry : list) elements += gguf_text(entry);
    return add(key, oscar::GgufType::kArray,
               gguf_array(oscar::GgufType::kString, list.size(), elements));
  }
  template <typename T>
  GgufBuilder& numbers(const std::string& key, oscar::GgufType type, const std::vector<T>& list) {
    std::string elements;
    for (const T entry : list) elements += bytes_of(entry);
    return add(key, oscar::GgufType::kArray, gguf_array(type, list.size(), elements));
  }
  // Appends its bytes behind those of the tensors before.
  GgufBuilder& tensor(const std::string& name, std::vector<uint64_t> dimensions, uint32_t type,
                      const std::string& bytes) {
    data.resize((data.size() + alignment - 1) / alignment * alignment);
    tensors.push_back({name, std::move(dimensions), type, data.size()});
    data += bytes;
    return *this;
  }
  GgufBuilder& f32(const std::string& name, std::vector<uint64_t> dimensions,
                   const std::vector<float>& list) {
    std::string bytes;
    for (const float entry : list) bytes += bytes_of(entry);
    return tensor(name, std::move(dimensions), 0, bytes);
  }

  std::string bytes() const {
    std::string file = "GGUF" + bytes_of(version) +
                       bytes_of(tensors.size() + static_cast<uint64_t>(extra_tensors)) +
                       bytes_of(values.size() + static_cast<uint64_t>(extra_values));
    for (const std::string& value : values) file += value;
    for (const GgufTestTensor& tensor : tensors) {
      file += gguf_text(tensor.name) + bytes_of(static_cast<uint32_t>(tensor.dimensions.size()));
      for (const uint64_t size : tensor.dimensions) file += bytes_of(size);
      file += bytes_of(tensor.type) + bytes_of(tensor.offset);
    }
    if (!data.empty()) file.resize((file.size() + alignment - 1) / alignment * alignment);
    return file + data;
  }
};

}  // namespace oscar_test
