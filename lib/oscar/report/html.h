// Text of unknown origin made safe for HTML and SVG.
#pragma once

#include <string>
#include <string_view>

namespace oscar {

// `text` with U+FFFD for bytes that are no UTF-8, for control characters but line breaks and tabs,
// and for marks that turn the writing direction.
std::string without_controls(std::string_view text);

// The same for element content and for attributes in double quotes: markup characters become
// entities.
std::string escape_html(std::string_view text);

// At most `characters` code points of `text` (unescaped): the start gives way to an ellipsis,
// because variants of a method differ at the end.
std::string shortened(const std::string& text, size_t characters);

}  // namespace oscar
