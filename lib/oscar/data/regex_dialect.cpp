// A walk over the pattern that copies what both engines agree on and refuses the rest.
#include "oscar/data/regex_dialect.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "oscar/base/error.h"
#include "oscar/data/tokenizer_json.h"

namespace oscar {
namespace {

// PCRE2 10.42 counts U+180E as white space; Unicode has not since 6.3.
constexpr std::string_view kSpace =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"
    "\\x{205f}\\x{3000}";
constexpr std::string_view kNotSpace =
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}"
    "\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}"
    "\\x{3001}-\\x{10ffff}";

constexpr std::array<std::string_view, 31> kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N",  "Nd", "Nl", "No", "P", "Pc",
    "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp"};

class Walk {
 public:
  Walk(std::string_view pattern, const std::string& where) : in_(pattern), where_(where) {}

  std::string run() {
    while (!at_end()) {
      if (peek() == '\\') {
        escape(false);
      } else if (peek() == '[') {
        character_class();
      } else if (peek() == '(') {
        group();
      } else if (peek() == '{') {
        counted_quantifier();
      } else if (peek() == '$') {
        out_ += "(?=\\n|\\z)";
        ++at_;
      } else if (peek() == '.' || peek() == '^') {
        refuse(1);
      } else {
        if (peek() == ')' && depth_ > 0 && depth_-- == caseless_depth_) caseless_depth_ = 0;
        copy(1);
      }
    }
    return out_;
  }

 private:
  bool at_end() const { return at_ >= in_.size(); }
  char peek(size_t ahead = 0) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }
  void copy(size_t count) {
    out_ += in_.substr(at_, count);
    at_ += count;
  }
  [[noreturn]] void refuse(size_t count) const {
    refuse_tokenizer("regular expression construct '" + std::string(in_.substr(at_, count)) + "'",
                     where_ + ", pattern " + std::string(in_));
  }

  void escape(bool in_class) {
    const char kind = peek(1);
    const auto put = [&](std::string_view list) {
      out_ += in_class ? std::string(list) : "[" + std::string(list) + "]";
      at_ += 2;
    };
    if (kind == 'p' || kind == 'P') {
      property();
    } else if (kind == 's') {
      put(kSpace);
    } else if (kind == 'S') {
      put(kNotSpace);
    } else if (kind == 'd' || kind == 'D') {
      out_ += kind == 'd' ? "\\p{Nd}" : "\\P{Nd}";
      at_ += 2;
    } else if (kind == 'r' || kind == 'n' || kind == 't' ||
               (kind != '\0' && std::ispunct(static_cast<unsigned char>(kind)) != 0)) {
      copy(2);
    } else {
      refuse(2);
    }
  }

  void property() {
    if (caseless_depth_ > 0) refuse(2);
    const size_t close = in_.find('}', at_);
    if (peek(2) != '{' || close == std::string_view::npos) refuse(3);
    const std::string_view name = in_.substr(at_ + 3, close - at_ - 3);
    const size_t length = close + 1 - at_;
    if (std::find(kCategories.begin(), kCategories.end(), name) == kCategories.end()) {
      refuse(length);
    }
    copy(length);
  }

  void character_class() {
    if (caseless_depth_ > 0) refuse(1);
    copy(1);
    if (peek() == '^') copy(1);
    if (peek() == ']') refuse(1);
    while (!at_end() && peek() != ']') {
      if (peek() == '[' || (peek() == '&' && peek(1) == '&')) refuse(2);
      if (peek() == '\\') {
        escape(true);
      } else {
        copy(1);
      }
    }
    if (at_end()) refuse(0);
    copy(1);
  }

  void group() {
    ++depth_;
    if (peek(1) != '?') return copy(1);
    for (const std::string_view opening : {"(?:", "(?=", "(?!", "(?>"}) {
      if (in_.substr(at_, opening.size()) == opening) return copy(opening.size());
    }
    if (in_.substr(at_, 4) != "(?i:") refuse(4);
    if (caseless_depth_ == 0) caseless_depth_ = depth_;
    copy(4);
  }

  // {n}, {n,} and {n,m}. A sign behind it means possessive or lazy to one engine only.
  void counted_quantifier() {
    size_t end = at_ + 1;
    if (std::isdigit(static_cast<unsigned char>(peek(1))) == 0) refuse(2);
    while (end < in_.size() &&
           (std::isdigit(static_cast<unsigned char>(in_[end])) != 0 || in_[end] == ',')) {
      ++end;
    }
    if (end >= in_.size() || in_[end] != '}') refuse(end - at_);
    copy(end + 1 - at_);
    if (peek() == '+' || peek() == '?' || peek() == '*') refuse(1);
  }

  std::string_view in_;
  const std::string& where_;
  std::string out_;
  size_t at_ = 0;
  int depth_ = 0, caseless_depth_ = 0;
};

}  // namespace

std::string pattern_for_pcre2(std::string_view pattern, const std::string& where) {
  return Walk(pattern, where).run();
}

}  // namespace oscar
