// A small model folder written by a test: safetensors files, config.json, and clean-up.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "oscar/base/json.h"

namespace oscar_test {

// A folder of its own under the system's temporary folder, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static int count = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("oscar-test-" + std::to_string(::getpid()) + "-" + std::to_string(count++));
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code status;
    std::filesystem::remove_all(path_, status);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// Header length, header, data: the bytes of a safetensors file, right or wrong.
inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(length >> (8 * i));
  return bytes + header + data;
}

// An F32 tensor to be written.
struct TestTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;
};

inline std::string safetensors_bytes(const std::map<std::string, TestTensor>& tensors) {
  oscar::Json header = oscar::Json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const size_t begin = data.size(), bytes = tensor.values.size() * sizeof(float);
    data.resize(begin + bytes);
    std::memcpy(data.data() + begin, tensor.values.data(), bytes);
    header[name] = {
        {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, begin + bytes}}};
  }
  return safetensors_bytes(header.dump(), data);
}

}  // namespace oscar_test
