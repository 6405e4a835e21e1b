// numpy's .npy and .npz.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/io/weight_source.h"

namespace oscar {

// The header of NumPy's .npy format (numpy.lib.format): magic, a Python dictionary as text.

struct NpyHeader {
  std::string type;  // "<i4"; empty: a structured type
  bool fortran_order = false;
  std::vector<uint64_t> shape;
  size_t data_begin = 0;
};

// Of format versions 1 to 3. Throws Error naming `where` for anything malformed.
NpyHeader parse_npy_header(std::string_view bytes, const std::string& where);

// Of version 1, C order, padded to 64 bytes.
std::string npy_header(std::string_view type, const std::vector<uint64_t>& shape);

// NumPy's .npy files of integers: reading token ids, writing int32.

// Row-major, 1-D [n] or 2-D [rows, columns].
struct NpyIntegers {
  std::vector<uint64_t> shape;
  std::vector<int64_t> values;  // unsigned 64-bit values above INT64_MAX arrive as that
};

// Reads format versions 1 to 3, any integer type and byte order, C or Fortran order. Throws Error
// naming the file for anything else: floats, booleans, objects, other ranks, a size that is not the
// header's.
NpyIntegers read_npy_integers(const std::filesystem::path& path);
// The same of a file's content; `where` names it in errors.
NpyIntegers parse_npy_integers(std::string_view bytes, const std::string& where);
// Longer files are not read.
inline constexpr size_t kMostNpyBytes = size_t{1} << 36;

// Writes int32, atomically. `values` has the product of `shape` entries.
void write_npy_int32(const std::filesystem::path& path, const std::vector<uint64_t>& shape,
                     const std::vector<int32_t>& values);

// NumPy's .npz: arrays by name, each a .npy file in a zip archive.

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
