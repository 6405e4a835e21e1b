// Text of unknown origin made safe for Markdown.
#pragma once

#include <string>
#include <string_view>

namespace oscar {

// `text` on one line, in tables too, without_controls: nothing in it acts as markup or HTML.
std::string escape_markdown(std::string_view text);

// The same inside backticks, where nothing can be escaped: what would end them becomes '?'.
std::string markdown_code(std::string_view text);

}  // namespace oscar
