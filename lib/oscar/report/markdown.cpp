// HTML first, as Markdown lets it through, then Markdown's own characters.
#include "oscar/report/markdown.h"

#include "oscar/report/html.h"

namespace oscar {

std::string escape_markdown(std::string_view text) {
  std::string out;
  for (const char c : without_controls(text)) {
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
  for (const char c : without_controls(text)) {
    out += std::string_view("\n\t`|").find(c) != std::string_view::npos ? '?' : c;
  }
  return "`" + out + "`";
}

}  // namespace oscar
