// What files say, made safe and short enough to print on a terminal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace oscar {

// Bytes of a quoted text that are shown at most.
inline constexpr size_t kShownBytes = 1000;

// Text of unknown origin as a terminal or a log may have it, in time and memory that do not grow
// with what is left out: control characters, what changes the direction of writing, invisible
// characters and bytes that are no UTF-8 are written as escapes ("\n", "\x1b", "\u202e"), and of
// what is longer than `bytes` the middle is left out, with its length.
std::string printable(std::string_view text, size_t bytes = kShownBytes);

// The same line by line, each of `bytes` at most: line breaks stay as they are.
std::string printable_lines(std::string_view text, size_t bytes = kShownBytes);

}  // namespace oscar
