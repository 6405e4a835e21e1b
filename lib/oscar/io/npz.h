// NumPy's .npz: arrays by name, each a .npy file in a zip archive.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "oscar/io/float_tensor.h"

namespace oscar {

// Every array of numpy.savez, as float32. Throws Error naming file and array for a damaged archive,
// a compressed one, objects, complex numbers and texts, more than 8 dimensions, and a size that is
// not the header's.
FloatTensors read_npz(const std::filesystem::path& path);

// An array of any type, in C order.
struct NpzArray {
  std::string type;  // NumPy's: "<f8"
  std::vector<uint64_t> shape;
  std::string bytes;  // as many as type and shape say
};

// Atomically; the second as float32. Equal arrays give equal bytes.
void write_npz(const std::filesystem::path& path, const std::map<std::string, NpzArray>& arrays);
void write_npz(const std::filesystem::path& path, const FloatTensors& arrays);

}  // namespace oscar
