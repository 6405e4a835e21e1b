// numpy's .npy and .npz.
#include "oscar/io/npy.h"

#include <fmt/format.h>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string_view>

#include "oscar/base/error.h"
#include "oscar/base/files.h"
#include "oscar/base/json.h"
#include "oscar/cache/numeric.h"
#include "oscar/io/zip.h"

namespace oscar {

// What NumPy writes is read, and nothing else: a damaged word could change the order of values.

namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

[[noreturn]] void malformed(const std::string& where, const std::string& expected) {
  throw Error({.what = "malformed .npy file", .where = where, .expected = expected});
}

// The dictionary as NumPy writes it, from front to back: three keys in any order, each once. Other
// spellings of the same in Python (escapes, comments, 1_000) are refused.
class HeaderText {
 public:
  HeaderText(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  // The next character that is no space; NUL at the end.
  char next() {
    const size_t at = text_.find_first_not_of(" \t\r\n\f");
    text_.remove_prefix(std::min(at, text_.size()));
    return text_.empty() ? '\0' : text_.front();
  }
  bool take(char c) {
    if (next() != c || text_.empty()) return false;
    text_.remove_prefix(1);
    return true;
  }
  void expect(char c) {
    if (!take(c)) malformed(where_, std::string("a header with '") + c + "' in its place");
  }
  bool take_word(std::string_view word) {
    next();
    if (!text_.starts_with(word)) return false;
    text_.remove_prefix(word.size());
    return true;
  }
  bool at_end() {
    next();
    return text_.empty();
  }

  std::string quoted() {
    const char quote = next();
    const size_t end = quote == '\'' || quote == '"' ? text_.find(quote, 1) : std::string::npos;
    if (end == std::string::npos) malformed(where_, "a header with names in quotes");
    std::string word(text_.substr(1, end - 1));
    if (word.find('\\') != std::string::npos) malformed(where_, "names without escapes");
    text_.remove_prefix(end + 1);
    return word;
  }

  // A type in quotes; empty for a structured one, which is left out up to its last bracket.
  std::string type() {
    if (next() != '[' && next() != '(') return quoted();
    size_t depth = 0;
    do {
      const char c = next();
      if (c == '\'' || c == '"') {
        quoted();
        continue;
      }
      if (c == '\0') malformed(where_, "a type");
      if (c == '[' || c == '(') ++depth;
      if (c == ']' || c == ')') --depth;
      text_.remove_prefix(1);
    } while (depth > 0);
    return "";
  }

  bool truth() {
    if (take_word("True")) return true;
    if (take_word("False")) return false;
    malformed(where_, "True or False behind 'fortran_order'");
  }

  uint64_t number() {
    next();
    const size_t digits = std::min(text_.find_first_not_of("0123456789"), text_.size());
    constexpr size_t kMostDigits = 15;  // of what fits a file
    if (digits == 0 || digits > kMostDigits || (digits > 1 && text_[0] == '0')) {
      malformed(where_, "a shape of numbers that fits a file");
    }
    const uint64_t value = std::stoull(std::string(text_.substr(0, digits)));
    text_.remove_prefix(digits);
    take_word("L");  // of Python 2
    return value;
  }

  std::vector<uint64_t> shape() {
    std::vector<uint64_t> sizes;
    expect('(');
    while (!take(')')) {
      sizes.push_back(number());
      if (take(',')) continue;
      if (sizes.size() == 1) malformed(where_, "a shape: (3) is a number, (3,) a shape");
      expect(')');
      break;
    }
    return sizes;
  }

 private:
  std::string_view text_;
  const std::string& where_;
};

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
  NpyHeader header;
  header.data_begin = begin + length;
  HeaderText text(bytes.substr(begin, length), where);
  std::set<std::string> seen;
  text.expect('{');
  while (!text.take('}')) {
    const std::string key = text.quoted();
    if (!seen.insert(key).second) malformed(where, "a header with '" + key + "' once");
    text.expect(':');
    if (key == "descr") {
      header.type = text.type();
    } else if (key == "fortran_order") {
      header.fortran_order = text.truth();
    } else if (key == "shape") {
      header.shape = text.shape();
    } else {
      malformed(where, "a header of descr, fortran_order and shape");
    }
    if (text.take(',')) continue;
    text.expect('}');
    break;
  }
  if (seen.size() != 3 || !text.at_end()) {
    malformed(where, "a header of descr, fortran_order and shape alone");
  }
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

// Raw values behind the header.

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

// Members NAME.npy; the order of values is the array's own, C or Fortran.

namespace {

constexpr std::string_view kSuffix = ".npy";
constexpr size_t kMostArrayDimensions = 8, kArrayAlignment = 64;

// The number whose bytes, the lowest first, are `bits`.
float number_of(char kind, size_t width, uint64_t bits) {
  if (kind == 'f' && width == 8) return static_cast<float>(std::bit_cast<double>(bits));
  if (kind == 'f' && width == 4) return std::bit_cast<float>(static_cast<uint32_t>(bits));
  if (kind == 'f') return fp16_to_float(static_cast<uint16_t>(bits));
  if (kind != 'i') return static_cast<float>(bits);
  const size_t unused = 64 - 8 * width;
  return static_cast<float>(static_cast<int64_t>(bits << unused) >> unused);
}

bool is_number(char kind, size_t width) {
  const bool whole = width == 1 || width == 2 || width == 4 || width == 8;
  if (kind == 'f') return whole && width > 1;
  return (whole && (kind == 'i' || kind == 'u')) || (kind == 'b' && width == 1);
}

FloatTensor read_array(std::string_view bytes, const std::string& where) {
  const NpyHeader header = parse_npy_header(bytes, where);
  const std::string& type = header.type;
  const bool plain =
      type.size() == 3 && std::string_view("<>|=").find(type[0]) != std::string_view::npos;
  const char kind = plain ? type[1] : '?';
  const auto width = static_cast<size_t>(plain ? type[2] - '0' : 0);
  if (!is_number(kind, width)) {
    throw Error({.what = "not an array of numbers",
                 .where = where,
                 .expected = "float16, float32, float64 or integers",
                 .found = type.empty() ? "a structured type" : "numpy type '" + type + "'"});
  }
  FloatTensor array;
  uint64_t count = 1;
  bool fits = header.shape.size() <= kMostArrayDimensions;
  for (const uint64_t size : header.shape) {
    array.shape.push_back(static_cast<int64_t>(size));
    fits = fits && !__builtin_mul_overflow(count, size, &count);
  }
  const std::string_view data = bytes.substr(header.data_begin);
  if (!fits || data.size() % width != 0 || data.size() / width != count) {
    throw Error({.what = "the size of an array disagrees with its shape and type",
                 .where = where,
                 .found = fmt::format("{} bytes", data.size())});
  }
  // In elements, the last index fastest, or the first.
  const size_t dimensions = array.shape.size();
  std::vector<uint64_t> strides(dimensions, 1), index(dimensions, 0);
  for (size_t i = 1; i < dimensions; ++i) {
    const size_t to = header.fortran_order ? i : dimensions - 1 - i;
    const size_t from = header.fortran_order ? i - 1 : dimensions - i;
    strides[to] = strides[from] * header.shape[from];
  }
  const bool big_endian = type[0] == '>';
  array.values.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t at = 0, bits = 0;
    for (size_t k = 0; k < dimensions; ++k) at += index[k] * strides[k];
    for (size_t b = 0; b < width; ++b) {
      const size_t place = big_endian ? b : width - 1 - b;
      bits = bits << 8 | static_cast<uint8_t>(data[at * width + place]);
    }
    array.values.push_back(number_of(kind, width, bits));
    for (size_t k = dimensions; k-- > 0 && ++index[k] == header.shape[k];) index[k] = 0;
  }
  return array;
}

}  // namespace

FloatTensors read_npz(const std::filesystem::path& path) {
  const ZipArchive archive = ZipArchive::open(path);
  FloatTensors arrays;
  for (const auto& [name, bytes] : archive.members()) {
    const std::string where = fmt::format("{}: {}", path.string(), name);
    if (!name.ends_with(kSuffix)) {
      throw Error({.what = "a member is no array", .where = where, .expected = "NAME.npy"});
    }
    arrays.emplace(name.substr(0, name.size() - kSuffix.size()), read_array(bytes, where));
  }
  return arrays;
}

void write_npz(const std::filesystem::path& path, const std::map<std::string, NpzArray>& arrays) {
  std::vector<ZipMember> members;
  for (const auto& [name, array] : arrays) {
    members.push_back(
        {name + std::string(kSuffix), npy_header(array.type, array.shape) + array.bytes});
  }
  write_zip(path, members, kArrayAlignment);
}

void write_npz(const std::filesystem::path& path, const FloatTensors& arrays) {
  std::map<std::string, NpzArray> typed;
  for (const auto& [name, array] : arrays) {
    const auto* const data = reinterpret_cast<const char*>(array.values.data());
    typed[name] = {"<f4",
                   {array.shape.begin(), array.shape.end()},
                   std::string(data, array.values.size() * sizeof(float))};
  }
  write_npz(path, typed);
}

}  // namespace oscar
