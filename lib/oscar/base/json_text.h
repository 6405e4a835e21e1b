// JSON as text: what is checked before it is parsed, and the words for what the parser refuses.
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace oscar {

inline constexpr int kMaxJsonDepth = 256;  // files of models, corpora and reports stay under 16

// Throws Error when values are nested deeper than kMaxJsonDepth. Copying and writing a value takes
// stack for every level, so that a few kilobytes of brackets would end the program.
void require_shallow_json(std::string_view text, const std::string& source);

// What the parser says about `text`, without its own name for the exception. A text of one line has
// no line number: it may be one of many in a file.
std::string json_problem(const std::exception& error, std::string_view text);

}  // namespace oscar
