// Text of unknown origin made safe for HTML and SVG.
#pragma once

#include <string>
#include <string_view>

namespace oscar {

// `text` for element content and for attributes in double quotes. Markup characters become
// entities; bytes that are no UTF-8, control characters and marks that turn the writing direction
// become U+FFFD.
std::string escape_html(std::string_view text);

// At most `characters` code points of `text` (unescaped): the start gives way to an ellipsis,
// because variants of a method differ at the end.
std::string shortened(const std::string& text, size_t characters);

}  // namespace oscar
