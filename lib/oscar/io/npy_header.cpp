// What NumPy writes is read, and nothing else: a damaged word could change the order of values.
#include "oscar/io/npy_header.h"

#include <algorithm>
#include <set>

#include "oscar/base/error.h"

namespace oscar {
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

}  // namespace oscar
