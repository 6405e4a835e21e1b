// JSON as text: a check before it is parsed, and the parser's message as users see it.
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <string_view>

namespace oscar {

// Levels of arrays and objects. Files of models, corpora and reports have fewer than 16.
inline constexpr int kMaxJsonDepth = 256;

// Bytes of a JSON file. In memory its values take up to 49 times as many (a list of
// one-digit numbers, measured).
inline constexpr size_t kMaxJsonBytes = size_t{1} << 28;
// Of a config.json or a chat template, which published models have of some kilobytes.
inline constexpr size_t kMaxConfigBytes = size_t{1} << 22;

// Throws Error, naming `source` and the byte, where brackets outside strings are nested deeper than
// kMaxJsonDepth: copying and writing a value takes stack for every level, so that a file of
// brackets could end the program. Looks at nothing else of the text.
void require_shallow_json(std::string_view text, const std::string& source);

// A value as text; bytes that are no UTF-8, of a file's name for example, become U+FFFD. Indented
// over several lines with `indent` >= 0.
template <typename Value>
std::string json_text(const Value& value, int indent = -1) {
  return value.dump(indent, ' ', false, Value::error_handler_t::replace);
}

// The message of `error`, which the parser threw for `text`, without its "[json.exception. ...]".
// Of a text of one line "line 1, " is left out too: it may be any line of a JSONL file.
std::string json_problem(const std::exception& error, std::string_view text);

}  // namespace oscar
