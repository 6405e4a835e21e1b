// Reading and finding patterns of tokenizer.json.
#include "oscar/data/text_pattern.h"

#include "oscar/data/regex_dialect.h"
#include "oscar/data/unicode.h"

namespace oscar {

TextPattern read_text_pattern(const TokenizerJson& object, const char* key,
                              const std::string& where) {
  const auto pattern = object.find(key);
  if (pattern == object.end() || !pattern->is_object() || pattern->size() != 1) {
    refuse_tokenizer("a pattern that is neither String nor Regex", where + ": " + key);
  }
  if (pattern->contains("Regex")) {
    return Regex(pattern_for_pcre2(string_member(*pattern, "Regex", where), where), where);
  }
  if (!pattern->contains("String")) {
    refuse_tokenizer("pattern '" + pattern->begin().key() + "'", where);
  }
  std::string text = string_member(*pattern, "String", where);
  if (text.empty()) refuse_tokenizer("an empty String pattern", where);
  return text;
}

std::optional<Match> find_pattern(const TextPattern& pattern, std::string_view text,
                                  size_t offset) {
  if (const auto* regex = std::get_if<Regex>(&pattern)) return regex->find(text, offset);
  if (const auto* literal = std::get_if<std::string>(&pattern)) {
    const size_t begin = text.find(*literal, offset);
    if (begin == std::string_view::npos) return std::nullopt;
    return Match{begin, begin + literal->size()};
  }
  const CharacterTest is_wanted = std::get<CharacterTest>(pattern);
  while (offset < text.size()) {
    const size_t begin = offset;
    if (is_wanted(next_code_point(text, offset))) return Match{begin, offset};
  }
  return std::nullopt;
}

}  // namespace oscar
