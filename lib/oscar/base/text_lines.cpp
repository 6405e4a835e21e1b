// Wrapping at blanks.
#include "oscar/base/text_lines.h"

#include <fmt/format.h>

namespace oscar {

std::string printable(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text;
}

void add_line(std::string& text, const std::string& label, const std::string& words,
              size_t indent) {
  constexpr size_t kColumns = 80;
  std::string line = fmt::format("{:<{}}", label, indent);
  for (size_t begin = 0; begin < words.size();) {
    size_t end = words.find(' ', begin);
    if (end == std::string::npos) end = words.size();
    const size_t length = end - begin;
    if (line.size() > indent && line.size() + 1 + length > kColumns) {
      text += line + "\n";
      line = std::string(indent, ' ');
    }
    if (line.size() > indent) line += " ";
    line += words.substr(begin, length);
    begin = end + 1;
  }
  text += line + "\n";
}

}  // namespace oscar
