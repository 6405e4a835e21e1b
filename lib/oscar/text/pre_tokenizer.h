// What happens to text before and behind its encoding: normalising, splitting, special tokens.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "oscar/text/regex.h"
#include "oscar/text/unicode.h"

namespace oscar {

// What the readers of tokenizer.json's parts share: the JSON type, key checks, refusals by name.

// Sorted keys: the insertion-ordered kind searches linearly, too slow for a vocabulary.
using TokenizerJson = nlohmann::json;

// Throws Error for malformed JSON, and for what is nested too deeply to read safely.
TokenizerJson parse_tokenizer_json(const std::string& text, const std::string& source);

// Throws Error that `component` is not implemented, with the way out (pre-tokenized ids).
[[noreturn]] void refuse_tokenizer(const std::string& component, const std::string& where);

// Throws Error unless `object` is an object whose keys are all in `known`.
void check_keys(const TokenizerJson& object, std::initializer_list<std::string_view> known,
                const std::string& where);

// The string under "type". Throws Error when there is none.
std::string type_of(const TokenizerJson& object, const std::string& where);

// Typed members; absent or null gives the fallback. Throw Error for another type.
bool bool_member(const TokenizerJson& object, const char* key, bool fallback,
                 const std::string& where);
std::string string_member(const TokenizerJson& object, const char* key, const std::string& where);

const TokenizerJson& list_member(const TokenizerJson& object, const char* key,
                                 const std::string& where);

// A token id: an integer in [0, 2^24). Throws Error otherwise.
int token_id_value(const TokenizerJson& value, const std::string& where);

// True for an absent key, null and, where the library treats it so, an empty string.
bool is_unset(const TokenizerJson& object, const char* key);

// What normalizers and pre-tokenizers look for: a literal string, a kind of character, or a regular
// expression.

using CharacterTest = bool (*)(char32_t);
using TextPattern = std::variant<std::string, CharacterTest, Regex>;

// Reads {"String": ..} or {"Regex": ..} under `key`. Throws Error for empty strings, and for
// expressions that are not implemented or can match nothing.
TextPattern read_text_pattern(const TokenizerJson& object, const char* key,
                              const std::string& where);

// First match at or after `offset` of valid UTF-8, never empty.
std::optional<Match> find_pattern(const TextPattern& pattern, std::string_view text, size_t offset);

// Cutting text at what a pattern finds, in the five ways of the `tokenizers` library.

// What becomes of matches.
enum class SplitBehavior {
  kRemoved,
  kIsolated,            // each is a piece
  kMergedWithPrevious,  // joined to the text before it, unless that is a match
  kMergedWithNext,      // joined to the text behind it, unless that is a match
  kContiguous,          // matches side by side are one piece
};

// Throws Error naming a behaviour that does not exist.
SplitBehavior parse_split_behavior(const std::string& name, const std::string& where);

struct TextSplit {
  TextPattern pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // what lies between matches counts as match, and matches as text
};

// Calls visit(begin, end) for the pieces of valid UTF-8 `text`, in order, none empty.
void for_each_piece(const TextSplit& split, std::string_view text,
                    const std::function<void(size_t begin, size_t end)>& visit);

// The normalizer of tokenizer.json: text to the text that the vocabulary was made of.

struct ReplaceStep {
  TextPattern pattern;
  std::string content;
};
struct PrependStep {
  std::string content;
};
struct LowercaseStep {};
struct StripStep {
  bool left = false, right = false;  // white space of Unicode
};

using NormalizerStep = std::variant<NormalForm, ReplaceStep, PrependStep, LowercaseStep, StripStep>;

struct Normalizer {
  std::vector<NormalizerStep> steps;
};

// Throws Error naming any normalizer that is not implemented.
Normalizer read_normalizer(const TokenizerJson& object, const std::string& where);

// Valid UTF-8 to valid UTF-8. Throws Error when replacements make the text many times longer than
// any writing system needs.
std::string normalize(const Normalizer& normalizer, std::string_view text);

// The pre-tokenizer of tokenizer.json: how text becomes words that BPE never crosses.

// When `prefix` is put before a piece that does not begin with it.
enum class PrefixScheme { kNever, kFirst, kAlways };

// One pass over the pieces so far; each is changed in this order, then cut.
struct PreTokenizerStep {
  std::string for_space = {};  // replaces every space; empty: nothing does
  std::string prefix = {};
  PrefixScheme prefix_scheme = PrefixScheme::kNever;  // kFirst: the piece that begins the text
  std::optional<TextSplit> split = {};
  bool to_byte_alphabet = false;  // writes the pieces in the characters of bpe.h
};

// Where a byte-level step comes last, it is left to bpe.h to read bytes: `to_byte_alphabet` is not
// set, and words are bytes of UTF-8, which may end inside a character of the text.
struct PreTokenizer {
  std::vector<PreTokenizerStep> steps;
  bool words_are_bytes = false;
  bool looks_for_text_begin = false;  // a step has PrefixScheme::kFirst
};

// Throws Error naming any pre-tokenizer or setting that is not implemented.
PreTokenizer read_pre_tokenizer(const TokenizerJson& object, const std::string& where);

// The piece as a step changes it before it is cut; held by `changed` if it does.
std::string_view change_piece(const PreTokenizerStep& step, std::string_view piece,
                              bool begins_text, std::string& changed);

// The post-processor of tokenizer.json: special tokens before and behind the ids of a text.

struct PostProcessor {
  std::vector<int32_t> prefix, suffix;
};

// Reads templates (of one text; pairs do not occur here) and byte-level processors, which move
// offsets only. Throws Error naming anything else.
PostProcessor read_post_processor(const TokenizerJson& object, const std::string& where);

// Added tokens: contents that are cut out of the text before anything else looks at it.

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false;                 // left out when decoding without special tokens
  bool normalized = false;              // looked for after normalisation, else before
  bool lstrip = false, rstrip = false;  // takes the white space on that side with it
  bool single_word = false;             // only between characters that are no word characters
};

// Throws Error for malformed entries, empty contents and contents or ids given twice.
std::vector<AddedToken> read_added_tokens(const TokenizerJson& list, const std::string& where);

// Finds tokens in text: leftmost first, the longest at one place, never overlapping.
class AddedTokenMatcher {
 public:
  AddedTokenMatcher();
  // `pattern` is what to look for: the content, normalised for normalized tokens. Of equal
  // patterns the first counts.
  void add(std::string_view pattern, const AddedToken& token);

  // Calls visit(piece, id) along the text: id >= 0 for a token (white space it took included),
  // -1 for text between tokens, never empty.
  void split(std::string_view text,
             const std::function<void(std::string_view piece, int32_t id)>& visit) const;

 private:
  struct Node {
    std::map<char, size_t> children;
    int token = -1;  // index of the token that ends here
  };
  // Index of the longest token that begins at `offset`, and its end; -1 if none.
  int longest_at(std::string_view text, size_t offset, size_t& end) const;
  bool stands_alone(std::string_view text, size_t begin, size_t end) const;

  std::array<bool, 256> begins_token_{};  // by the first byte
  std::vector<Node> nodes_;
  std::vector<AddedToken> tokens_;
  Regex word_;
};

}  // namespace oscar
