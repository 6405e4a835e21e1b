// Compiled regular expressions over UTF-8.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace oscar {

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
