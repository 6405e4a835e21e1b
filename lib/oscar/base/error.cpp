// Errors of four lines, wrong usage, progress, and what a terminal may be shown of them.
#include "oscar/base/error.h"

#include <algorithm>
#include <cstdint>

namespace oscar {

// Escapes. Without fmt: the operators' library for Python holds this file and has none.

namespace {

struct CodePoint {
  char32_t value = 0;
  size_t bytes = 0;  // 0: the next byte begins no UTF-8
};

CodePoint decode(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return {};
  char32_t value = lead & (0xFFU >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {};
    value = value << 6 | (byte(i) & 0x3FU);
  }
  const char32_t least = length == 4 ? 0x10000 : length == 3 ? 0x800 : 0x80;
  const bool surrogate = value >= 0xD800 && value < 0xE000;
  if (value < least || value > 0x10FFFF || surrogate) return {};
  return {value, length};
}

// Controls, formats of direction, separators of lines, and what shows nothing at all.
bool is_shown(char32_t c) {
  const auto in = [c](char32_t first, char32_t last) { return c >= first && c <= last; };
  return !(c < 0x20 || in(0x7F, 0x9F) || c == 0xAD || c == 0x61C || in(0x200B, 0x200F) ||
           in(0x2028, 0x202E) || in(0x2060, 0x206F) || c == 0xFEFF || in(0xFFF0, 0xFFFB) ||
           in(0xE0000, 0xE0FFF));
}

// At least so many digits.
std::string hex(uint32_t value, size_t digits) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (; value > 0 || text.size() < digits; value >>= 4U) text.insert(0, 1, kDigits[value & 15U]);
  return text;
}

std::string escaped(std::string_view text) {
  const auto is_plain = [](char c) { return c >= 0x20 && c < 0x7F; };
  std::string out;
  while (true) {
    const auto plain = std::find_if_not(text.begin(), text.end(), is_plain) - text.begin();
    out += text.substr(0, static_cast<size_t>(plain));
    text.remove_prefix(static_cast<size_t>(plain));
    if (text.empty()) return out;
    const CodePoint c = decode(text);
    const size_t bytes = std::max<size_t>(c.bytes, 1);
    if (c.bytes == 0) {
      out += "\\x" + hex(static_cast<unsigned char>(text[0]), 2);
    } else if (is_shown(c.value)) {
      out += text.substr(0, bytes);
    } else if (c.value == '\n' || c.value == '\t') {
      out += c.value == '\n' ? "\\n" : "\\t";
    } else {
      const auto value = static_cast<uint32_t>(c.value);
      out += value < 0x80 ? "\\x" + hex(value, 2) : "\\u" + hex(value, 4);
    }
    text.remove_prefix(bytes);
  }
}

bool continues(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

}  // namespace

std::string printable(std::string_view text, size_t bytes) {
  if (text.size() <= bytes) return escaped(text);
  // Of a name both ends say something; what is cut apart in the middle of a character is left out.
  constexpr size_t kLongestTail = 3;
  size_t head = bytes - bytes / 3, tail = text.size() - bytes / 3;
  for (size_t i = 0; i < kLongestTail && head > 0 && continues(text[head]); ++i) --head;
  for (size_t i = 0; i < kLongestTail && tail < text.size() && continues(text[tail]); ++i) ++tail;
  return escaped(text.substr(0, head)) + " [... " + std::to_string(tail - head) + " bytes ...] " +
         escaped(text.substr(tail));
}

std::string printable_lines(std::string_view text, size_t bytes) {
  std::string out;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    out += (begin == 0 ? "" : "\n") + printable(text.substr(begin, end - begin), bytes);
    begin = end + 1;
  }
  return out;
}

// Layout of an error text: the sentence first, then one indented line per known part.

namespace {

std::string error_text(const ErrorInfo& info) {
  std::string text = printable_lines(info.what);
  const auto add_line = [&text](const char* label, const std::string& value) {
    if (!value.empty()) text += std::string("\n  ") + label + printable(value);
  };
  add_line("where:    ", info.where);
  add_line("expected: ", info.expected);
  add_line("found:    ", info.found);
  if (!info.hint.empty()) text += "\n  hint:     " + printable_lines(info.hint);
  return text;
}

}  // namespace

Error::Error(ErrorInfo info) : std::runtime_error(error_text(info)), info_(std::move(info)) {}

}  // namespace oscar
