// The pre-tokenizer of tokenizer.json: text to words that BPE never crosses.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/data/regex.h"
#include "oscar/data/tokenizer_json.h"

namespace oscar {

// One pass over the words so far.
struct SplitStep {
  std::optional<Regex> regex;     // matches and what lies between them become words
  bool add_prefix_space = false;  // before cutting, when the word does not begin with a space
};

// Split steps ending in a byte-level one. The change to byte characters is left to bpe.h, which
// works on bytes.
struct PreTokenizer {
  std::vector<SplitStep> steps;
};

// Throws Error naming any pre-tokenizer or setting that is not implemented.
PreTokenizer read_pre_tokenizer(const TokenizerJson& object, const std::string& where);

// Calls `visit` for each word of valid UTF-8 `text`, in order; the view lives for that call.
void for_each_word(const PreTokenizer& pre_tokenizer, std::string_view text,
                   const std::function<void(std::string_view)>& visit);

}  // namespace oscar
