// What the readers of tokenizer.json's parts share: the JSON type, key checks, refusals by name.
#pragma once

#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace oscar {

// Sorted keys: the insertion-ordered kind searches linearly, too slow for a vocabulary.
using TokenizerJson = nlohmann::json;

// Throws Error for malformed JSON, and for what is nested too deeply to read safely.
TokenizerJson parse_tokenizer_json(const std::string& text, const std::string& source);

// Throws Error that `component` is not implemented, with the way out (pre-tokenized ids).
[[noreturn]] void refuse_tokenizer(const std::string& component, const std::string& where);

// Throws Error unless `object` is an object whose keys are all in `known`.
void check_keys(const TokenizerJson& object, std::initializer_list<std::string_view> known,
                const std::string& where);

// The string under "type". Throws Error when there is none.
std::string type_of(const TokenizerJson& object, const std::string& where);

// Typed members; absent or null gives the fallback. Throw Error for another type.
bool bool_member(const TokenizerJson& object, const char* key, bool fallback,
                 const std::string& where);
std::string string_member(const TokenizerJson& object, const char* key, const std::string& where);

const TokenizerJson& list_member(const TokenizerJson& object, const char* key,
                                 const std::string& where);

// A token id: an integer in [0, 2^24). Throws Error otherwise.
int token_id_value(const TokenizerJson& value, const std::string& where);

// True for an absent key, null and, where the library treats it so, an empty string.
bool is_unset(const TokenizerJson& object, const char* key);

}  // namespace oscar
