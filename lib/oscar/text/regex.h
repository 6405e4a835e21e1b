// Regular expressions of tokenizers, through PCRE2.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace oscar {

// Oniguruma patterns, as tokenizer.json holds them, rewritten for PCRE2.

// The same language for PCRE2 in UTF mode with Unicode properties. Only constructs that mean the
// same in both (or can be spelled out, as \s is) pass; any other throws Error naming the construct
// and `where`. Case-insensitive groups hold only letters and signs, because multi-letter case
// folding differs.
std::string pattern_for_pcre2(std::string_view pattern, const std::string& where);

// Compiled regular expressions over UTF-8.

struct Match {
  size_t begin, end;  // bytes
};

class Regex {
 public:
  // `pattern` is in PCRE2's syntax (pattern_for_pcre2 makes it). Throws Error when it does not
  // compile or can match the empty string; `where` names its origin.
  Regex(const std::string& pattern, const std::string& where);
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;

  // First match at or after `offset` of valid UTF-8; nothing outside `text` is seen. Throws Error
  // when the engine gives up. One thread at a time.
  std::optional<Match> find(std::string_view text, size_t offset) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace oscar
