// Raw values behind the header.
#include "oscar/io/npy.h"

#include <limits>
#include <string_view>

#include "oscar/base/atomic_file.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/io/npy_header.h"

namespace oscar {
namespace {

// One value of `width` bytes as the header's type says.
int64_t value_at(const char* bytes, size_t width, bool big_endian, bool is_signed) {
  uint64_t value = 0;
  for (size_t i = 0; i < width; ++i) {
    const size_t place = big_endian ? i : width - 1 - i;
    value = value << 8 | static_cast<uint8_t>(bytes[place]);
  }
  if (is_signed) {
    const size_t unused = 64 - 8 * width;
    return static_cast<int64_t>(value << unused) >> unused;
  }
  constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  return static_cast<int64_t>(value > kMax ? kMax : value);
}

// Width of an integer type such as "<i4"; throws Error for any other type.
size_t integer_width(const std::string& type, const std::string& where) {
  if (type.empty()) {
    throw Error(
        {.what = "token ids must be plain integers", .where = where, .found = "a structured type"});
  }
  const bool has_order =
      type.size() == 3 && std::string_view("<>|=").find(type[0]) != std::string_view::npos;
  const char kind = has_order ? type[1] : '?', digit = has_order ? type[2] : '?';
  const bool known = (kind == 'i' || kind == 'u') &&
                     (digit == '1' || digit == '2' || digit == '4' || digit == '8');
  if (!known) {
    throw Error({.what = kind == 'f' ? "token ids are floats" : "token ids are not integers",
                 .where = where,
                 .expected = "an integer type such as int32",
                 .found = "numpy type '" + type + "'",
                 .hint = "save them with .astype(numpy.int32)"});
  }
  return static_cast<size_t>(digit - '0');
}

}  // namespace

NpyIntegers read_npy_integers(const std::filesystem::path& path) {
  return parse_npy_integers(read_text_file(path, kMostNpyBytes), path.string());
}

NpyIntegers parse_npy_integers(std::string_view bytes, const std::string& where) {
  const NpyHeader header = parse_npy_header(bytes, where);
  const size_t width = integer_width(header.type, where);
  const auto& shape = header.shape;
  if (shape.empty() || shape.size() > 2) {
    throw Error({.what = "token ids must be 1-D (one stream) or 2-D (one sequence a row)",
                 .where = where,
                 .found = std::to_string(shape.size()) + " dimensions"});
  }
  const uint64_t rows = shape.size() == 2 ? shape[0] : 1, columns = shape.back();
  const uint64_t room = (bytes.size() - header.data_begin) / width;
  const bool fits = rows == 0 || columns <= room / rows;
  if (!fits || bytes.size() - header.data_begin != rows * columns * width) {
    throw Error({.what = ".npy file is truncated or too long",
                 .where = where,
                 .expected = std::to_string(rows) + " x " + std::to_string(columns) +
                             " values of " + std::to_string(width) + " bytes",
                 .found = std::to_string(bytes.size() - header.data_begin) + " bytes"});
  }
  NpyIntegers result{shape, std::vector<int64_t>(rows * columns)};
  const char* data = bytes.data() + header.data_begin;
  for (uint64_t i = 0; i < rows * columns; ++i) {  // not by row: rows of no values may be many
    const uint64_t from = header.fortran_order ? i % columns * rows + i / columns : i;
    result.values[i] =
        value_at(data + from * width, width, header.type[0] == '>', header.type[1] == 'i');
  }
  return result;
}

void write_npy_int32(const std::filesystem::path& path, const std::vector<uint64_t>& shape,
                     const std::vector<int32_t>& values) {
  std::string bytes = npy_header("<i4", shape);
  bytes.reserve(bytes.size() + 4 * values.size());
  for (const int32_t value : values) {
    const auto bits = static_cast<uint32_t>(value);
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>((bits >> (8 * i)) & 0xFF);
  }
  write_file_atomically(path, bytes);
}

}  // namespace oscar
