// What happens to text before and behind its encoding: normalising, splitting, special tokens.
#include "oscar/text/pre_tokenizer.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/text/regex.h"
#include "oscar/text/unicode.h"

namespace oscar {

// Checked access to tokenizer.json.

namespace {

constexpr int64_t kMaxTokenId = int64_t{1} << 24;  // bounds tables that are indexed by id

}  // namespace

TokenizerJson parse_tokenizer_json(const std::string& text, const std::string& source) {
  return parse_strict_json<TokenizerJson>(text, source);
}

void refuse_tokenizer(const std::string& component, const std::string& where) {
  throw Error(
      {.what = "tokenizer uses something that is not implemented: " + component,
       .where = where,
       .hint = "tokenize elsewhere, pass ids as .npy (python -m oscar_int2 prepare-corpus)"});
}

void check_keys(const TokenizerJson& object, std::initializer_list<std::string_view> known,
                const std::string& where) {
  if (!object.is_object()) {
    throw Error({.what = "malformed tokenizer file",
                 .where = where,
                 .expected = "a JSON object",
                 .found = object.type_name()});
  }
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      refuse_tokenizer("key '" + key + "'", where);
    }
  }
}

std::string type_of(const TokenizerJson& object, const std::string& where) {
  return string_member(object, "type", where);
}

bool bool_member(const TokenizerJson& object, const char* key, bool fallback,
                 const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return fallback;
  if (!found->is_boolean()) {
    throw Error({.what = "malformed tokenizer file",
                 .where = where + ": " + key,
                 .expected = "true or false",
                 .found = found->type_name()});
  }
  return found->get<bool>();
}

std::string string_member(const TokenizerJson& object, const char* key, const std::string& where) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  if (found == object.end() || !found->is_string()) {
    throw Error({.what = "malformed tokenizer file",
                 .where = where + ": " + key,
                 .expected = "a string",
                 .found = found == object.end() ? "nothing" : found->type_name()});
  }
  return found->get<std::string>();
}

const TokenizerJson& list_member(const TokenizerJson& object, const char* key,
                                 const std::string& where) {
  const auto list = object.find(key);
  if (list == object.end() || !list->is_array()) {
    throw Error(
        {.what = "malformed tokenizer file", .where = where + ": " + key, .expected = "a list"});
  }
  return *list;
}

int token_id_value(const TokenizerJson& value, const std::string& where) {
  // A document in memory may have it as either kind of integer.
  const bool fits = value.is_number_unsigned()
                        ? value.get<uint64_t>() < uint64_t{kMaxTokenId}
                        : value.is_number_integer() && value.get<int64_t>() >= 0 &&
                              value.get<int64_t>() < kMaxTokenId;
  if (!fits) {
    throw Error({.what = "malformed tokenizer file",
                 .where = where,
                 .expected = "a token id from 0 to " + std::to_string(kMaxTokenId - 1),
                 .found = value.dump()});
  }
  return value.get<int>();
}

bool is_unset(const TokenizerJson& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ||
         (found->is_string() && found->get_ref<const std::string&>().empty());
}

// Reading and finding patterns of tokenizer.json.

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

// Matches and what lies between them, joined as the behaviour says.

namespace {

constexpr std::array<std::pair<std::string_view, SplitBehavior>, 5> kBehaviors = {{
    {"Removed", SplitBehavior::kRemoved},
    {"Isolated", SplitBehavior::kIsolated},
    {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
    {"MergedWithNext", SplitBehavior::kMergedWithNext},
    {"Contiguous", SplitBehavior::kContiguous},
}};

// Calls take(begin, end, is_match) along the text.
template <typename Take>
void for_each_stretch(const TextSplit& split, std::string_view text, Take&& take) {
  for (size_t offset = 0; offset < text.size();) {
    const auto match = find_pattern(split.pattern, text, offset);
    const size_t begin = match ? match->begin : text.size();
    if (begin > offset) take(offset, begin, split.invert);
    if (!match) return;
    take(begin, match->end, !split.invert);
    offset = match->end;
  }
}

// A piece that what comes next may still be joined to.
class Joiner {
 public:
  Joiner(SplitBehavior behavior, const std::function<void(size_t, size_t)>& visit)
      : behavior_(behavior), visit_(visit) {}

  void take(size_t begin, size_t end, bool is_match) {
    if (has_piece_ && joins(is_match)) {
      end_ = end;
    } else {
      finish();
      begin_ = begin;
      end_ = end;
      has_piece_ = true;
    }
    is_match_ = is_match;
  }

  void finish() {
    if (has_piece_) visit_(begin_, end_);
    has_piece_ = false;
  }

 private:
  bool joins(bool is_match) const {
    if (behavior_ == SplitBehavior::kContiguous) return is_match == is_match_;
    if (behavior_ == SplitBehavior::kMergedWithPrevious) return is_match && !is_match_;
    return !is_match && is_match_;
  }

  SplitBehavior behavior_;
  const std::function<void(size_t, size_t)>& visit_;
  size_t begin_ = 0, end_ = 0;
  bool has_piece_ = false, is_match_ = false;  // is_match_: the last stretch of the piece
};

}  // namespace

SplitBehavior parse_split_behavior(const std::string& name, const std::string& where) {
  const auto* const found = std::find_if(kBehaviors.begin(), kBehaviors.end(),
                                         [&](const auto& entry) { return entry.first == name; });
  if (found == kBehaviors.end()) refuse_tokenizer("behavior '" + name + "'", where);
  return found->second;
}

void for_each_piece(const TextSplit& split, std::string_view text,
                    const std::function<void(size_t, size_t)>& visit) {
  if (split.behavior == SplitBehavior::kIsolated || split.behavior == SplitBehavior::kRemoved) {
    const bool keep = split.behavior == SplitBehavior::kIsolated;
    for_each_stretch(split, text, [&](size_t begin, size_t end, bool is_match) {
      if (keep || !is_match) visit(begin, end);
    });
    return;
  }
  Joiner joiner(split.behavior, visit);
  for_each_stretch(split, text, [&](size_t begin, size_t end, bool is_match) {
    joiner.take(begin, end, is_match);
  });
  joiner.finish();
}

// Reading and running normalizers.

namespace {

constexpr size_t kMaxNormalizers = 64;
// NFKD, which lengthens most, makes 11 bytes of one; the rest is for short texts and prefixes.
constexpr size_t kMaxGrowth = 32, kMaxPrefix = 256;

constexpr std::array<std::pair<std::string_view, NormalForm>, 4> kForms = {{
    {"NFC", NormalForm::kNfc},
    {"NFD", NormalForm::kNfd},
    {"NFKC", NormalForm::kNfkc},
    {"NFKD", NormalForm::kNfkd},
}};

void read_normalizer_steps(const TokenizerJson& object, const std::string& where, Normalizer& out) {
  const std::string type = type_of(object, where);
  const auto* const form = std::find_if(kForms.begin(), kForms.end(),
                                        [&](const auto& entry) { return entry.first == type; });
  if (type == "Sequence") {
    check_keys(object, {"type", "normalizers"}, where);
    for (const TokenizerJson& part : list_member(object, "normalizers", where)) {
      read_normalizer_steps(part, where, out);
    }
    return;
  }
  if (form != kForms.end()) {
    check_keys(object, {"type"}, where);
    out.steps.emplace_back(form->second);
  } else if (type == "Replace") {
    check_keys(object, {"type", "pattern", "content"}, where);
    out.steps.emplace_back(ReplaceStep{read_text_pattern(object, "pattern", where),
                                       string_member(object, "content", where)});
  } else if (type == "Prepend") {
    check_keys(object, {"type", "prepend"}, where);
    out.steps.emplace_back(PrependStep{string_member(object, "prepend", where)});
  } else if (type == "Lowercase") {
    check_keys(object, {"type"}, where);
    out.steps.emplace_back(LowercaseStep{});
  } else if (type == "Strip") {
    check_keys(object, {"type", "strip_left", "strip_right"}, where);
    out.steps.emplace_back(StripStep{bool_member(object, "strip_left", true, where),
                                     bool_member(object, "strip_right", true, where)});
  } else {
    refuse_tokenizer("normalizer '" + type + "'", where);
  }
  if (out.steps.size() > kMaxNormalizers) {
    refuse_tokenizer("more than " + std::to_string(kMaxNormalizers) + " normalizers", where);
  }
}

// What a step may make of a text: replacements can be repeated until memory ends.
class Limit {
 public:
  explicit Limit(size_t size) : most_(kMaxGrowth * size + kMaxPrefix) {}
  void check(size_t size) const {
    if (size <= most_) return;
    throw Error({.what = "normalizer makes a text much longer",
                 .where = "tokenizer.json: normalizer",
                 .expected = "at most " + std::to_string(most_) + " bytes"});
  }

 private:
  size_t most_;
};

std::string run(NormalForm form, const std::string& text, const Limit& /*limit*/) {
  return normalize_unicode(text, form);
}

std::string run(const ReplaceStep& step, const std::string& text, const Limit& limit) {
  std::string out;
  size_t offset = 0;
  while (const auto match = find_pattern(step.pattern, text, offset)) {
    out.append(text, offset, match->begin - offset);
    out += step.content;
    limit.check(out.size());
    offset = match->end;
  }
  if (offset == 0) return text;
  out.append(text, offset);
  return out;
}

std::string run(const PrependStep& step, const std::string& text, const Limit& /*limit*/) {
  return text.empty() ? text : step.content + text;
}

std::string run(LowercaseStep /*step*/, const std::string& text, const Limit& /*limit*/) {
  return lowercase(text);
}

std::string run(StripStep step, const std::string& text, const Limit& /*limit*/) {
  std::string_view kept = text;
  if (step.left) kept.remove_prefix(white_space_end(kept, 0));
  if (step.right) kept = kept.substr(0, white_space_begin(kept, kept.size()));
  return std::string(kept);
}

}  // namespace

Normalizer read_normalizer(const TokenizerJson& object, const std::string& where) {
  Normalizer normalizer;
  if (!object.is_null()) read_normalizer_steps(object, where, normalizer);
  return normalizer;
}

std::string normalize(const Normalizer& normalizer, std::string_view text) {
  const Limit limit(text.size());
  std::string normal(text);
  for (const NormalizerStep& step : normalizer.steps) {
    normal = std::visit([&](const auto& s) { return run(s, normal, limit); }, step);
    limit.check(normal.size());
  }
  return normal;
}

// Reading pre-tokenizers, and how their steps change pieces before they are cut.

namespace {

constexpr size_t kMaxPreTokenizers = 16;  // each is a level of recursion (bpe.h)

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

// Reading templates.

namespace {

void append_special(const TokenizerJson& tokens, const TokenizerJson& part,
                    const std::string& where, std::vector<int32_t>& ids) {
  const std::string name = string_member(part, "id", where);
  const auto token = tokens.find(name);
  if (token == tokens.end() || !token->is_object()) {
    throw Error({.what = "malformed tokenizer file",
                 .where = where + ": special_tokens",
                 .expected = "an entry for '" + name + "'"});
  }
  for (const TokenizerJson& id : list_member(*token, "ids", where)) {
    ids.push_back(token_id_value(id, where + ": special_tokens " + name));
  }
}

PostProcessor read_template(const TokenizerJson& object, const std::string& where) {
  check_keys(object, {"type", "single", "pair", "special_tokens"}, where);
  const TokenizerJson tokens = object.value("special_tokens", TokenizerJson::object());
  PostProcessor frame;
  int sequences = 0;
  for (const TokenizerJson& part : list_member(object, "single", where)) {
    check_keys(part, {"SpecialToken", "Sequence"}, where);
    if (part.contains("Sequence")) {
      ++sequences;
    } else {
      append_special(tokens, part.value("SpecialToken", TokenizerJson()), where,
                     sequences == 0 ? frame.prefix : frame.suffix);
    }
  }
  if (sequences != 1) refuse_tokenizer("a template without exactly one sequence", where);
  return frame;
}

// Adds the ids of one processor around those of the ones before it.
void read_processor(const TokenizerJson& object, const std::string& where, PostProcessor& frame) {
  const std::string type = type_of(object, where);
  if (type == "ByteLevel") {  // it moves offsets only
    check_keys(object, {"type", "add_prefix_space", "trim_offsets", "use_regex"}, where);
  } else if (type == "TemplateProcessing") {
    const PostProcessor outer = read_template(object, where);
    frame.prefix.insert(frame.prefix.begin(), outer.prefix.begin(), outer.prefix.end());
    frame.suffix.insert(frame.suffix.end(), outer.suffix.begin(), outer.suffix.end());
  } else if (type == "Sequence") {
    check_keys(object, {"type", "processors"}, where);
    for (const TokenizerJson& part : list_member(object, "processors", where)) {
      read_processor(part, where, frame);
    }
  } else {
    refuse_tokenizer("post-processor '" + type + "'", where);
  }
}

}  // namespace

PostProcessor read_post_processor(const TokenizerJson& object, const std::string& where) {
  PostProcessor processor;
  if (!object.is_null()) read_processor(object, where, processor);
  return processor;
}

// A byte trie of added tokens, and the rules for the white space and words around them.

namespace {

// \w of Unicode (UTS 18, annex C), which PCRE2's own \w is not.
constexpr const char* kWordCharacter = R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200c}\x{200d}])";

}  // namespace

std::vector<AddedToken> read_added_tokens(const TokenizerJson& list, const std::string& where) {
  std::vector<AddedToken> tokens;
  if (list.is_null()) return tokens;
  if (!list.is_array()) {
    throw Error({.what = "malformed tokenizer file", .where = where, .expected = "a list"});
  }
  std::set<std::string> contents;
  std::set<int32_t> ids;
  for (const TokenizerJson& entry : list) {
    const std::string place = where + "[" + std::to_string(tokens.size()) + "]";
    check_keys(entry, {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"},
               place);
    AddedToken token;
    token.content = string_member(entry, "content", place);
    token.id = token_id_value(entry.value("id", TokenizerJson()), place + ".id");
    token.special = bool_member(entry, "special", false, place);
    token.normalized = bool_member(entry, "normalized", !token.special, place);
    token.lstrip = bool_member(entry, "lstrip", false, place);
    token.rstrip = bool_member(entry, "rstrip", false, place);
    token.single_word = bool_member(entry, "single_word", false, place);
    if (token.content.empty() || !contents.insert(token.content).second ||
        !ids.insert(token.id).second) {
      throw Error({.what = "malformed tokenizer file",
                   .where = place,
                   .expected = "a content and an id of its own",
                   .found = "'" + token.content + "', id " + std::to_string(token.id)});
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

AddedTokenMatcher::AddedTokenMatcher() : nodes_(1), word_(kWordCharacter, "added tokens") {}

void AddedTokenMatcher::add(std::string_view pattern, const AddedToken& token) {
  size_t node = 0;
  for (const char byte : pattern) {
    const auto [place, is_new] = nodes_[node].children.try_emplace(byte, nodes_.size());
    const size_t child = place->second;
    if (is_new) nodes_.emplace_back();  // moves nodes_: `place` is not used below
    node = child;
  }
  if (node == 0 || nodes_[node].token >= 0) return;
  begins_token_[static_cast<uint8_t>(pattern.front())] = true;
  nodes_[node].token = static_cast<int>(tokens_.size());
  tokens_.push_back(token);
}

int AddedTokenMatcher::longest_at(std::string_view text, size_t offset, size_t& end) const {
  int token = -1;
  const Node* node = nodes_.data();
  while (offset < text.size()) {
    const auto child = node->children.find(text[offset]);
    if (child == node->children.end()) break;
    node = &nodes_[child->second];
    ++offset;
    if (node->token >= 0) {
      token = node->token;
      end = offset;
    }
  }
  return token;
}

bool AddedTokenMatcher::stands_alone(std::string_view text, size_t begin, size_t end) const {
  const auto is_word_at = [&](size_t offset) {
    size_t next = offset;
    next_code_point(text, next);
    return word_.find(text.substr(offset, next - offset), 0).has_value();
  };
  return (begin == 0 || !is_word_at(previous_begin(text, begin))) &&
         (end == text.size() || !is_word_at(end));
}

void AddedTokenMatcher::split(std::string_view text,
                              const std::function<void(std::string_view, int32_t)>& visit) const {
  if (tokens_.empty()) {
    if (!text.empty()) visit(text, -1);
    return;
  }
  size_t done = 0;
  for (size_t offset = 0; offset < text.size();) {
    size_t begin = offset, end = 0;
    const int index =
        begins_token_[static_cast<uint8_t>(text[offset])] ? longest_at(text, offset, end) : -1;
    if (index < 0) {
      ++offset;
      continue;
    }
    // The search goes on behind the content, even when the token is discarded or takes more.
    offset = end;
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    if (token.single_word && !stands_alone(text, begin, end)) continue;
    if (token.lstrip) begin = std::max(white_space_begin(text, begin), done);
    if (token.rstrip) end = white_space_end(text, end);
    if (done < begin) visit(text.substr(done, begin - done), -1);
    visit(text.substr(begin, end - begin), token.id);
    done = end;
  }
  if (done < text.size()) visit(text.substr(done), -1);
}

}  // namespace oscar
