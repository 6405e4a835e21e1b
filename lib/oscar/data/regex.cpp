// The one owner of PCRE2: UTF mode, Unicode properties, JIT where the platform has it.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "oscar/data/regex.h"

#include <pcre2.h>

#include <cstdint>

#include "oscar/base/error.h"

namespace oscar {
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
  pcre2_pattern_info(state_->code, PCRE2_INFO_FIRSTBITMAP, &state_->first_bytes);
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
