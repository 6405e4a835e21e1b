// UTF-8 validation and repair, code points, white space and normalisation form C.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace oscar {

inline constexpr size_t kAllValid = std::string_view::npos;

// Byte offset of the first ill-formed UTF-8 sequence (surrogates, overlong forms and values above
// U+10FFFF included), or kAllValid.
size_t first_invalid_utf8(std::string_view text);

// Throws Error naming `where` and the byte offset unless `text` is valid UTF-8.
void require_valid_utf8(std::string_view text, const std::string& where);

// Every maximal ill-formed part becomes U+FFFD (Unicode 14, chapter 3, U+FFFD substitution).
std::string replace_invalid_utf8(std::string_view bytes);

// Code point at `offset` of valid UTF-8; moves `offset` behind it.
char32_t next_code_point(std::string_view text, size_t& offset);

void append_code_point(char32_t code_point, std::string& text);

// Property White_Space of Unicode, which is what \s means to the `tokenizers` library.
bool is_white_space(char32_t code_point);

// Normalisation form C of valid UTF-8 as the `tokenizers` library makes it: marks assigned after
// Unicode 9 are left where they stand. Linear but for n log n sorting of runs of marks.
std::string normalize_nfc(std::string_view text);

}  // namespace oscar
