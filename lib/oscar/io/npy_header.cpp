// Keys in any order; the text behind each is looked for by name.
#include "oscar/io/npy_header.h"

#include <cctype>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

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

}  // namespace

NpyHeader parse_npy_header(std::string_view bytes, const std::string& where) {
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

  NpyHeader header;
  header.data_begin = begin + length;
  const std::string_view type = value_of(dictionary, "descr", where);
  const size_t quote = type.find('\'', 1);
  if (type.front() == '\'' && quote != std::string_view::npos) {
    header.type = type.substr(1, quote - 1);
  }
  header.fortran_order = value_of(dictionary, "fortran_order", where).substr(0, 4) == "True";
  header.shape = parse_shape(value_of(dictionary, "shape", where), where);
  return header;
}

std::string npy_header(std::string_view type, const std::vector<uint64_t>& shape) {
  std::string dictionary =
      "{'descr': '" + std::string(type) + "', 'fortran_order': False, 'shape': (";
  for (const uint64_t size : shape) dictionary += std::to_string(size) + ",";
  dictionary += "), }";
  constexpr size_t kPreamble = 10;  // magic, version, length; the whole is padded to 64 bytes
  while ((kPreamble + dictionary.size() + 1) % 64 != 0) dictionary += ' ';
  dictionary += '\n';
  std::string bytes(kMagic);
  bytes += {'\x01', '\x00', static_cast<char>(dictionary.size() & 0xFF),
            static_cast<char>(dictionary.size() >> 8)};
  bytes += dictionary;
  return bytes;
}

}  // namespace oscar
