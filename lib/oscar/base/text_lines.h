// Lines of text in 80 columns for what files say, safe to print on a terminal.
#pragma once

#include <string>

namespace oscar {

// Control characters become '?'.
std::string printable(std::string text);

// Appends "label       words", the words behind `indent` columns and wrapped below themselves.
void add_line(std::string& text, const std::string& label, const std::string& words,
              size_t indent = 12);

}  // namespace oscar
