// A strict UTF-8 reader, one code point at a time, and what each may become.
#include "oscar/report/html.h"

#include <cstdint>

namespace oscar {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

struct CodePoint {
  char32_t value = 0;
  size_t bytes = 1;
  bool valid = false;
};

CodePoint decode(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  if (first < 0x80) return {first, 1, true};
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || at + length > text.size()) return {};
  char32_t value = first & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return {};
    value = value << 6 | (byte(at + i) & 0x3F);
  }
  constexpr char32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = value >= 0xD800 && value <= 0xDFFF;
  if (value < kSmallest[length] || value > 0x10FFFF || surrogate) return {};
  return {value, length, true};
}

// Not allowed in XML, or able to make a page show something other than what it says.
bool unwelcome(char32_t c) {
  const bool control = (c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7F && c < 0xA0);
  const bool direction = (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069) ||
                         c == 0x200E || c == 0x200F || c == 0x061C;
  return control || direction || c == 0xFFFE || c == 0xFFFF;
}

}  // namespace

std::string without_controls(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint c = decode(text, i);
    out += !c.valid || unwelcome(c.value) ? kReplacement : text.substr(i, c.bytes);
    i += c.bytes;
  }
  return out;
}

std::string escape_html(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : without_controls(text)) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (c == '\'') {
      out += "&#39;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string shortened(const std::string& text, size_t characters) {
  std::string kept;
  size_t starts = 0;
  for (size_t i = text.size(); i > 0; --i) {
    const bool continues = (static_cast<unsigned char>(text[i - 1]) & 0xC0) == 0x80;
    if (continues) continue;
    if (++starts == characters) kept = text.substr(i - 1);
  }
  return starts <= characters ? text : "…" + kept.substr(decode(kept, 0).bytes);
}

}  // namespace oscar
