// What we read of safetensors and .npy files, for comparison with the packages of those names.
//   oscar-test-read-arrays safetensors|npy
// Standard input has a path a line. For each one a line of JSON: {"refused": TEXT}; of safetensors
// {"tensors": {NAME: [dtype, shape, first byte, bytes]}}; of .npy {"shape": ..., "values": ...}.
#include <cstdio>
#include <iostream>
#include <string>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/io/npy.h"
#include "oscar/io/safetensors.h"

namespace {

using namespace oscar;

Json read(const std::string& format, const std::string& path) {
  if (format == "npy") {
    const NpyIntegers array = read_npy_integers(path);
    return {{"shape", array.shape}, {"values", array.values}};
  }
  Json tensors = Json::object();
  const MappedFile file(path);
  for (const TensorEntry& entry : parse_safetensors_header(file)) {
    tensors[entry.name] = {entry.dtype, entry.shape, entry.offset, entry.bytes};
  }
  return {{"tensors", tensors}};
}

}  // namespace

int main(int argc, char** argv) {
  const std::string format = argc == 2 ? argv[1] : "";
  if (format != "safetensors" && format != "npy") return 2;
  for (std::string path; std::getline(std::cin, path);) {
    Json result;
    try {
      result = read(format, path);
    } catch (const Error& error) {
      result = {{"refused", error.what()}};
    }
    std::puts(json_text(result).c_str());
  }
  return 0;
}
