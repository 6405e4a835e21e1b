// The header of one safetensors file, parsed and checked against the size of the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "oscar/io/mapped_file.h"

namespace oscar {

// One entry of the header; `offset` counts from the start of the file.
struct TensorEntry {
  std::string name;
  std::string dtype;  // as written, for example "BF16" or "F8_E4M3"
  std::vector<int64_t> shape;
  size_t offset = 0;
  size_t bytes = 0;
};

// Parses and checks the header of a mapped file: its length, unique names, integer shapes, sizes
// that match shape and dtype, and offsets that cover the data exactly, without gap or overlap.
// Throws Error naming file and tensor.
std::vector<TensorEntry> parse_safetensors_header(const MappedFile& file);

}  // namespace oscar
