// Reading and running Split and ByteLevel steps.
#include "oscar/data/pre_tokenizer.h"

#include "oscar/base/error.h"
#include "oscar/data/regex_dialect.h"

namespace oscar {
namespace {

// What ByteLevel cuts with when use_regex is set: the GPT-2 pattern.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

SplitStep read_split(const TokenizerJson& object, const std::string& where) {
  check_keys(object, {"type", "pattern", "behavior", "invert"}, where);
  const std::string behavior = string_member(object, "behavior", where);
  if (behavior != "Isolated") refuse_tokenizer("Split behavior '" + behavior + "'", where);
  if (bool_member(object, "invert", false, where)) refuse_tokenizer("Split with invert", where);
  const auto pattern = object.find("pattern");
  if (pattern == object.end() || !pattern->is_object() || !pattern->contains("Regex")) {
    refuse_tokenizer("Split pattern that is not a Regex", where);
  }
  const std::string text = string_member(*pattern, "Regex", where);
  return {.regex = Regex(pattern_for_pcre2(text, where), where)};
}

SplitStep read_byte_level(const TokenizerJson& object, const std::string& where) {
  check_keys(object, {"type", "add_prefix_space", "trim_offsets", "use_regex"}, where);
  SplitStep step;
  step.add_prefix_space = bool_member(object, "add_prefix_space", true, where);
  if (bool_member(object, "use_regex", true, where)) {
    step.regex = Regex(pattern_for_pcre2(kByteLevelPattern, where), where);
  }
  return step;
}

void read_step(const TokenizerJson& object, const std::string& where, PreTokenizer& out,
               bool& has_bytes) {
  if (has_bytes) refuse_tokenizer("a pre-tokenizer behind ByteLevel", where);
  const std::string type = type_of(object, where);
  if (type == "Sequence") {
    check_keys(object, {"type", "pretokenizers"}, where);
    const auto list = object.find("pretokenizers");
    if (list == object.end() || !list->is_array()) {
      throw Error({.what = "malformed tokenizer file",
                   .where = where + ": pretokenizers",
                   .expected = "a list"});
    }
    for (size_t i = 0; i < list->size(); ++i) {
      read_step((*list)[i], where + "[" + std::to_string(i) + "]", out, has_bytes);
    }
  } else if (type == "Split") {
    out.steps.push_back(read_split(object, where));
  } else if (type == "ByteLevel") {
    out.steps.push_back(read_byte_level(object, where));
    has_bytes = true;
  } else {
    refuse_tokenizer("pre-tokenizer '" + type + "'", where);
  }
}

void run_steps(const PreTokenizer& pre_tokenizer, size_t index, std::string_view text,
               const std::function<void(std::string_view)>& visit) {
  if (text.empty()) return;
  if (index == pre_tokenizer.steps.size()) return visit(text);
  const SplitStep& step = pre_tokenizer.steps[index];
  std::string prefixed;
  if (step.add_prefix_space && text.front() != ' ') {
    prefixed.reserve(text.size() + 1);
    prefixed += ' ';
    prefixed += text;
    text = prefixed;
  }
  if (!step.regex) return run_steps(pre_tokenizer, index + 1, text, visit);
  size_t offset = 0;
  while (offset < text.size()) {
    const auto match = step.regex->find(text, offset);
    const size_t begin = match ? match->begin : text.size();
    run_steps(pre_tokenizer, index + 1, text.substr(offset, begin - offset), visit);
    if (!match) break;
    run_steps(pre_tokenizer, index + 1, text.substr(begin, match->end - begin), visit);
    offset = match->end;
  }
}

}  // namespace

PreTokenizer read_pre_tokenizer(const TokenizerJson& object, const std::string& where) {
  PreTokenizer pre_tokenizer;
  bool has_bytes = false;
  if (!object.is_null()) read_step(object, where, pre_tokenizer, has_bytes);
  if (!has_bytes) refuse_tokenizer("a pre-tokenizer without ByteLevel", where);
  return pre_tokenizer;
}

void for_each_word(const PreTokenizer& pre_tokenizer, std::string_view text,
                   const std::function<void(std::string_view)>& visit) {
  run_steps(pre_tokenizer, 0, text, visit);
}

}  // namespace oscar
