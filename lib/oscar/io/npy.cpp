// The .npy format (numpy.lib.format): magic, a Python dictionary as text, raw values.
#include "oscar/io/npy.h"

#include <cctype>
#include <cstring>
#include <limits>
#include <string_view>

#include "oscar/base/atomic_file.h"
#include "oscar/base/error.h"
#include "oscar/base/json.h"

namespace oscar {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

struct Header {
  std::string type;  // "<i4"
  bool fortran_order = false;
  std::vector<uint64_t> shape;
  size_t data_begin = 0;
};

[[noreturn]] void malformed(const std::string& where, const std::string& expected) {
  throw Error({.what = "malformed .npy file", .where = where, .expected = expected});
}

// The text behind `'key':`.
std::string_view value_of(std::string_view dictionary, const std::string& key,
                          const std::string& where) {
  const size_t at = dictionary.find("'" + key + "'");
  const size_t colon = at == std::string_view::npos ? at : dictionary.find(':', at);
  const size_t begin =
      colon == std::string_view::npos ? colon : dictionary.find_first_not_of(' ', colon + 1);
  if (begin == std::string_view::npos) malformed(where, "a header with '" + key + "'");
  return dictionary.substr(begin);
}

std::vector<uint64_t> parse_shape(std::string_view text, const std::string& where) {
  const size_t close = text.find(')');
  if (text.front() != '(' || close == std::string_view::npos) malformed(where, "a shape");
  std::vector<uint64_t> shape;
  bool in_number = false;
  for (const char c : text.substr(1, close - 1)) {
    if (std::isdigit(static_cast<unsigned char>(c)) != 0) {
      if (!in_number) shape.push_back(0);
      in_number = true;
      if (shape.back() > (uint64_t{1} << 48)) malformed(where, "a shape that fits a file");
      shape.back() = shape.back() * 10 + static_cast<uint64_t>(c - '0');
    } else if (c == ',' || c == ' ' || c == 'L') {
      in_number = false;
    } else {
      malformed(where, "a shape of numbers");
    }
  }
  return shape;
}

Header parse_header(std::string_view bytes, const std::string& where) {
  if (bytes.size() < 12 || bytes.substr(0, kMagic.size()) != kMagic) {
    malformed(where, "the magic bytes of .npy");
  }
  const auto byte = [&](size_t i) { return static_cast<size_t>(static_cast<uint8_t>(bytes[i])); };
  const size_t version = byte(6);
  if (version < 1 || version > 3) malformed(where, "format version 1, 2 or 3");
  const size_t begin = version == 1 ? 10 : 12;
  size_t length = byte(8) | byte(9) << 8;
  if (version > 1) length |= byte(10) << 16 | byte(11) << 24;
  if (length > bytes.size() - begin) malformed(where, "a whole header");
  const std::string_view dictionary = bytes.substr(begin, length);

  Header header;
  header.data_begin = begin + length;
  const std::string_view type = value_of(dictionary, "descr", where);
  const size_t quote = type.find('\'', 1);
  if (type.front() != '\'' || quote == std::string_view::npos) {
    throw Error(
        {.what = "token ids must be plain integers", .where = where, .found = "a structured type"});
  }
  header.type = type.substr(1, quote - 1);
  header.fortran_order = value_of(dictionary, "fortran_order", where).substr(0, 4) == "True";
  header.shape = parse_shape(value_of(dictionary, "shape", where), where);
  return header;
}

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
  const std::string where = path.string();
  const std::string bytes = read_text_file(path, size_t{1} << 36);
  const Header header = parse_header(bytes, where);
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
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint64_t column = 0; column < columns; ++column) {
      const uint64_t from = header.fortran_order ? column * rows + row : row * columns + column;
      result.values[row * columns + column] =
          value_at(data + from * width, width, header.type[0] == '>', header.type[1] == 'i');
    }
  }
  return result;
}

void write_npy_int32(const std::filesystem::path& path, const std::vector<uint64_t>& shape,
                     const std::vector<int32_t>& values) {
  std::string dictionary = "{'descr': '<i4', 'fortran_order': False, 'shape': (";
  for (const uint64_t size : shape) dictionary += std::to_string(size) + ",";
  dictionary += "), }";
  constexpr size_t kPreamble = 10;  // magic, version, length; the whole is padded to 64 bytes
  while ((kPreamble + dictionary.size() + 1) % 64 != 0) dictionary += ' ';
  dictionary += '\n';
  std::string bytes(kMagic);
  bytes += {'\x01', '\x00', static_cast<char>(dictionary.size() & 0xFF),
            static_cast<char>(dictionary.size() >> 8)};
  bytes += dictionary;
  bytes.reserve(bytes.size() + 4 * values.size());
  for (const int32_t value : values) {
    const auto bits = static_cast<uint32_t>(value);
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>((bits >> (8 * i)) & 0xFF);
  }
  write_file_atomically(path, bytes);
}

}  // namespace oscar
