// Regular expressions of tokenizers, through PCRE2.
#include "oscar/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8

#include <pcre2.h>
#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>

#include "oscar/base/error.h"
#include "oscar/text/pre_tokenizer.h"

namespace oscar {

// A walk over the pattern that copies what both engines agree on and refuses the rest.

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

// The one owner of PCRE2: UTF mode, Unicode properties, JIT where the platform has it.

namespace {

constexpr size_t kJitStackStart = 32 << 10, kJitStackMax = 16 << 20;

std::string message_of(int code) {
  PCRE2_UCHAR text[256] = {};
  pcre2_get_error_message(code, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

}  // namespace

struct Regex::State {
  pcre2_code* code = nullptr;
  pcre2_match_data* match = nullptr;
  pcre2_match_context* context = nullptr;
  pcre2_jit_stack* stack = nullptr;
  bool has_jit = false;
  const uint8_t* first_bytes = nullptr;  // 256 bits: bytes that a match can begin with, if known
  ~State() {
    pcre2_match_data_free(match);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
    pcre2_code_free(code);
  }
};

Regex::Regex(const std::string& pattern, const std::string& where)
    : state_(std::make_unique<State>()) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  state_->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (state_->code == nullptr) {
    throw Error({.what = "regular expression does not compile: " + message_of(error),
                 .where = where + ", at byte " + std::to_string(offset) + " of " + pattern});
  }
  uint32_t matches_empty = 0;
  pcre2_pattern_info(state_->code, PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) {
    throw Error({.what = "regular expression can match nothing, so it cannot cut text into words",
                 .where = where + ": " + pattern});
  }
  // Without JIT the interpreter runs.
  state_->has_jit = pcre2_jit_compile(state_->code, PCRE2_JIT_COMPLETE) == 0;
  pcre2_pattern_info(state_->code, PCRE2_INFO_FIRSTBITMAP,
                     static_cast<void*>(&state_->first_bytes));
  state_->match = pcre2_match_data_create_from_pattern(state_->code, nullptr);
  state_->context = pcre2_match_context_create(nullptr);
  state_->stack = pcre2_jit_stack_create(kJitStackStart, kJitStackMax, nullptr);
  if (state_->match == nullptr || state_->context == nullptr) {
    throw Error({.what = "out of memory for a regular expression", .where = where});
  }
  pcre2_jit_stack_assign(state_->context, nullptr, state_->stack);
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;

std::optional<Match> Regex::find(std::string_view text, size_t offset) const {
  // Most pieces of text hold no match: told here, without the engine's start, where it can be.
  if (const uint8_t* first = state_->first_bytes) {
    const auto begins_match = [&](uint8_t byte) {
      return (first[byte >> 3] >> (byte & 7) & 1) != 0;
    };
    while (offset < text.size() && !begins_match(static_cast<uint8_t>(text[offset]))) ++offset;
    if (offset == text.size()) return std::nullopt;
  }
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const int count = state_->has_jit
                        ? pcre2_jit_match(state_->code, subject, text.size(), offset, 0,
                                          state_->match, state_->context)
                        : pcre2_match(state_->code, subject, text.size(), offset,
                                      PCRE2_NO_UTF_CHECK, state_->match, state_->context);
  if (count == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (count < 0) {
    throw Error({.what = "regular expression engine gave up: " + message_of(count),
                 .where = "text of " + std::to_string(text.size()) + " bytes, at byte " +
                          std::to_string(offset),
                 .hint = "break very long lines of the corpus"});
  }
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(state_->match);
  return Match{range[0], range[1]};
}

}  // namespace oscar
