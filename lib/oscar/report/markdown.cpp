// HTML first, as Markdown lets it through, then Markdown's own characters.
#include "oscar/report/markdown.h"

#include "oscar/report/html.h"

namespace oscar {

std::string escape_markdown(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (std::string_view("&<>").find(c) != std::string_view::npos) {
      out += escape_html(std::string_view(&c, 1));
      continue;
    }
    if (std::string_view("\\`*_[]|#!~").find(c) != std::string_view::npos) out += '\\';
    out += c == '\n' || c == '\t' ? ' ' : c;
  }
  return out;
}

std::string markdown_code(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte == 0x7F || c == '`' || c == '|' ? '?' : c;
  }
  return "`" + out + "`";
}

}  // namespace oscar
