// What normalizers and pre-tokenizers look for: a literal string, a kind of character, or a regular
// expression.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "oscar/data/regex.h"
#include "oscar/data/tokenizer_json.h"

namespace oscar {

using CharacterTest = bool (*)(char32_t);
using TextPattern = std::variant<std::string, CharacterTest, Regex>;

// Reads {"String": ..} or {"Regex": ..} under `key`. Throws Error for empty strings, and for
// expressions that are not implemented or can match nothing.
TextPattern read_text_pattern(const TokenizerJson& object, const char* key,
                              const std::string& where);

// First match at or after `offset` of valid UTF-8, never empty.
std::optional<Match> find_pattern(const TextPattern& pattern, std::string_view text, size_t offset);

}  // namespace oscar
