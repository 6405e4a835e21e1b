// Unicode as tokenizers use it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace oscar {

// UTF-8 validation and repair, code points and their properties, normalisation forms.

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

// Byte offset of the code point that ends before `offset` > 0.
size_t previous_begin(std::string_view text, size_t offset);

// Where the white space that ends at `end`, or begins at `begin`, begins or ends.
size_t white_space_begin(std::string_view text, size_t end);
size_t white_space_end(std::string_view text, size_t begin);

// Properties as the `tokenizers` library knows them: number is category N; punctuation is ASCII's
// and category P of Unicode 8.
bool is_number(char32_t code_point);
bool is_punctuation(char32_t code_point);

// Every code point in lower case on its own: a sigma at the end of a word is one as any other.
std::string lowercase(std::string_view text);

enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };

// A normalisation form of valid UTF-8 as the `tokenizers` library makes it: marks, composites and
// compatibility characters assigned after Unicode 9 are left as they stand. Linear but for n log n
// sorting of runs of marks.
std::string normalize_unicode(std::string_view text, NormalForm form);

}  // namespace oscar
