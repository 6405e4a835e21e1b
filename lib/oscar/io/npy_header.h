// The header of NumPy's .npy format (numpy.lib.format): magic, a Python dictionary as text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

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

}  // namespace oscar
