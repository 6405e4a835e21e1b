// A folder whose matrices are stored in FP8, written by a test; every part can be made wrong.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "model/checkpoint/model_folder.h"
#include "oscar/cache/numeric.h"

namespace oscar_test {

// A tensor of any dtype, with its bytes.
struct RawTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using RawTensors = std::map<std::string, RawTensor>;

inline std::string safetensors_bytes(const RawTensors& tensors) {
  oscar::Json header = oscar::Json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const size_t begin = data.size();
    data += tensor.bytes;
    header[name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  return safetensors_bytes(header.dump(), data);
}

inline RawTensor f32(std::vector<int64_t> shape, const std::vector<float>& values) {
  std::string bytes(values.size() * sizeof(float), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return {"F32", std::move(shape), std::move(bytes)};
}

inline RawTensor bf16(std::vector<int64_t> shape, const std::vector<float>& values) {
  std::string bytes;
  for (const float value : values) {
    const uint16_t bits = oscar::float_to_bf16(value);
    bytes += static_cast<char>(bits & 0xff);
    bytes += static_cast<char>(bits >> 8);
  }
  return {"BF16", std::move(shape), std::move(bytes)};
}

// Codes 0, 1, 2, ... of finite values, over and over.
inline RawTensor codes(int64_t rows, int64_t columns) {
  std::string bytes;
  for (int64_t i = 0; i < rows * columns; ++i) bytes += static_cast<char>(i % 127);
  return {"F8_E4M3", {rows, columns}, std::move(bytes)};
}

inline oscar::Json fp8_config(std::vector<int64_t> block = {}) {
  oscar::Json config = {{"quant_method", "fp8"}, {"activation_scheme", "dynamic"}};
  if (!block.empty()) config["weight_block_size"] = block;
  return config;
}

inline oscar::Json compressed_config(const std::string& strategy) {
  const oscar::Json weights = {{"num_bits", 8},        {"type", "float"},
                               {"symmetric", true},    {"strategy", strategy},
                               {"dynamic", false},     {"group_size", nullptr},
                               {"observer", "minmax"}, {"observer_kwargs", oscar::Json::object()},
                               {"actorder", nullptr},  {"block_structure", nullptr}};
  const oscar::Json inputs = {
      {"num_bits", 8}, {"type", "float"}, {"strategy", "token"}, {"dynamic", true}};
  return {{"quant_method", "compressed-tensors"},
          {"format", "float-quantized"},
          {"quantization_status", "compressed"},
          {"global_compression_ratio", 1.5},
          {"kv_cache_scheme", nullptr},
          {"sparsity_config", oscar::Json::object()},
          {"version", "0.9.0"},
          {"ignore", {"lm_head"}},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", inputs}}}}}};
}

}  // namespace oscar_test
