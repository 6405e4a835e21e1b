// The pre-tokenizer of tokenizer.json: how text becomes words that BPE never crosses.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/data/text_split.h"
#include "oscar/data/tokenizer_json.h"

namespace oscar {

// When `prefix` is put before a piece that does not begin with it.
enum class PrefixScheme { kNever, kFirst, kAlways };

// One pass over the pieces so far; each is changed in this order, then cut.
struct PreTokenizerStep {
  std::string for_space = {};  // replaces every space; empty: nothing does
  std::string prefix = {};
  PrefixScheme prefix_scheme = PrefixScheme::kNever;  // kFirst: the piece that begins the text
  std::optional<TextSplit> split = {};
  bool to_byte_alphabet = false;  // writes the pieces in the characters of byte_alphabet.h
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

}  // namespace oscar
