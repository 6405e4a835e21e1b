// NumPy's .npy files of integers: reading token ids, writing int32.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

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

}  // namespace oscar
