// Reading pre-tokenizers, and how their steps change pieces before they are cut.
#include "oscar/data/pre_tokenizer.h"

#include "oscar/base/error.h"
#include "oscar/data/regex_dialect.h"
#include "oscar/data/unicode.h"

namespace oscar {
namespace {

constexpr size_t kMaxPreTokenizers = 16;  // each is a level of recursion (word_encoder.cpp)

// What ByteLevel cuts with when use_regex is set: the GPT-2 pattern.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Runs of word characters, and runs of what is neither those nor white space. \w is that of Unicode
// (UTS 18, annex C), which PCRE2's own is not.
constexpr const char* kWhitespacePattern =
    R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d}]+)"
    R"(|[^\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d}\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680})"
    R"(\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]+)";

PreTokenizerStep split_step(TextPattern pattern, SplitBehavior behavior, bool invert = false) {
  PreTokenizerStep step;
  step.split = TextSplit{std::move(pattern), behavior, invert};
  return step;
}

PreTokenizerStep read_split(const TokenizerJson& object, const std::string& where) {
  check_keys(object, {"type", "pattern", "behavior", "invert"}, where);
  return split_step(read_text_pattern(object, "pattern", where),
                    parse_split_behavior(string_member(object, "behavior", where), where),
                    bool_member(object, "invert", false, where));
}

PreTokenizerStep read_byte_level(const TokenizerJson& object, const std::string& where) {
  check_keys(object, {"type", "add_prefix_space", "trim_offsets", "use_regex"}, where);
  PreTokenizerStep step;
  if (bool_member(object, "use_regex", true, where)) {
    step = split_step(Regex(pattern_for_pcre2(kByteLevelPattern, where), where),
                      SplitBehavior::kIsolated);
  }
  if (bool_member(object, "add_prefix_space", true, where)) {
    step.prefix = " ";
    step.prefix_scheme = PrefixScheme::kAlways;
  }
  step.to_byte_alphabet = true;
  return step;
}

PrefixScheme read_prefix_scheme(const TokenizerJson& object, const std::string& where) {
  // Older files say only whether a prefix is added at all.
  const bool adds = bool_member(object, "add_prefix_space", true, where);
  if (is_unset(object, "prepend_scheme")) {
    return adds ? PrefixScheme::kAlways : PrefixScheme::kNever;
  }
  const std::string scheme = string_member(object, "prepend_scheme", where);
  if (scheme == "never") return PrefixScheme::kNever;
  if (!adds) refuse_tokenizer("prepend_scheme '" + scheme + "' without add_prefix_space", where);
  if (scheme == "always") return PrefixScheme::kAlways;
  if (scheme == "first") return PrefixScheme::kFirst;
  refuse_tokenizer("prepend_scheme '" + scheme + "'", where);
}

PreTokenizerStep read_metaspace(const TokenizerJson& object, const std::string& where) {
  check_keys(object,
             {"type", "replacement", "str_rep", "add_prefix_space", "prepend_scheme", "split"},
             where);
  const std::string replacement = string_member(object, "replacement", where);
  size_t end = 0;
  if (!replacement.empty()) next_code_point(replacement, end);
  if (end == 0 || end != replacement.size()) {
    throw Error({.what = "malformed tokenizer file",
                 .where = where + ": replacement",
                 .expected = "one character",
                 .found = "'" + replacement + "'"});
  }
  PreTokenizerStep step;
  if (bool_member(object, "split", true, where)) {
    step = split_step(replacement, SplitBehavior::kMergedWithNext);
  }
  step.for_space = step.prefix = replacement;
  step.prefix_scheme = read_prefix_scheme(object, where);
  return step;
}

PreTokenizerStep read_step(const TokenizerJson& object, const std::string& type,
                           const std::string& where) {
  if (type == "Split") return read_split(object, where);
  if (type == "ByteLevel") return read_byte_level(object, where);
  if (type == "Metaspace") return read_metaspace(object, where);
  if (type == "Digits") {
    check_keys(object, {"type", "individual_digits"}, where);
    return split_step(&is_number, bool_member(object, "individual_digits", false, where)
                                      ? SplitBehavior::kIsolated
                                      : SplitBehavior::kContiguous);
  }
  if (type == "Punctuation") {
    check_keys(object, {"type", "behavior"}, where);
    return split_step(&is_punctuation,
                      is_unset(object, "behavior")
                          ? SplitBehavior::kIsolated
                          : parse_split_behavior(string_member(object, "behavior", where), where));
  }
  if (type == "Whitespace") {
    check_keys(object, {"type"}, where);
    return split_step(Regex(kWhitespacePattern, where), SplitBehavior::kRemoved, true);
  }
  if (type == "WhitespaceSplit") {
    check_keys(object, {"type"}, where);
    return split_step(&is_white_space, SplitBehavior::kRemoved);
  }
  refuse_tokenizer("pre-tokenizer '" + type + "'", where);
}

void read_steps(const TokenizerJson& object, const std::string& where, PreTokenizer& out) {
  const std::string type = type_of(object, where);
  if (type == "Sequence") {
    check_keys(object, {"type", "pretokenizers"}, where);
    const TokenizerJson& list = list_member(object, "pretokenizers", where);
    for (size_t i = 0; i < list.size(); ++i) {
      read_steps(list[i], where + "[" + std::to_string(i) + "]", out);
    }
    return;
  }
  out.steps.push_back(read_step(object, type, where));
  if (out.steps.size() > kMaxPreTokenizers) {
    refuse_tokenizer("more than " + std::to_string(kMaxPreTokenizers) + " pre-tokenizers", where);
  }
}

bool takes_prefix(const PreTokenizerStep& step, std::string_view text, bool begins_text) {
  if (step.prefix_scheme == PrefixScheme::kNever) return false;
  if (step.prefix_scheme == PrefixScheme::kFirst && !begins_text) return false;
  return text.substr(0, step.prefix.size()) != step.prefix;
}

}  // namespace

PreTokenizer read_pre_tokenizer(const TokenizerJson& object, const std::string& where) {
  PreTokenizer pre_tokenizer;
  if (object.is_null()) return pre_tokenizer;
  read_steps(object, where, pre_tokenizer);
  for (const PreTokenizerStep& step : pre_tokenizer.steps) {
    if (step.prefix_scheme == PrefixScheme::kFirst) pre_tokenizer.looks_for_text_begin = true;
  }
  if (!pre_tokenizer.steps.empty() && pre_tokenizer.steps.back().to_byte_alphabet) {
    pre_tokenizer.steps.back().to_byte_alphabet = false;
    pre_tokenizer.words_are_bytes = true;
  }
  return pre_tokenizer;
}

std::string_view change_piece(const PreTokenizerStep& step, std::string_view text, bool begins_text,
                              std::string& changed) {
  if (!step.for_space.empty() && text.find(' ') != std::string_view::npos) {
    changed.reserve(text.size() + text.size() / 2);
    for (const char c : text) {
      if (c == ' ') {
        changed += step.for_space;
      } else {
        changed += c;
      }
    }
    text = changed;
  }
  if (takes_prefix(step, text, begins_text)) {
    changed = step.prefix + std::string(text);
    text = changed;
  }
  return text;
}

}  // namespace oscar
