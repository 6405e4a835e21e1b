// JSON as text: a check before it is parsed, and the parser's message as users see it.
#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace oscar {

// Levels of arrays and objects. Files of models, corpora and reports have fewer than 16.
inline constexpr int kMaxJsonDepth = 256;

// Throws Error, naming `source` and the byte, where brackets outside strings are nested deeper than
// kMaxJsonDepth: copying and writing a value takes stack for every level, so that a file of
// brackets could end the program. Looks at nothing else of the text.
void require_shallow_json(std::string_view text, const std::string& source);

// The message of `error`, which the parser threw for `text`, without its "[json.exception. ...]".
// Of a text of one line "line 1, " is left out too: it may be any line of a JSONL file.
std::string json_problem(const std::exception& error, std::string_view text);

}  // namespace oscar
