// The normalizer of tokenizer.json: text to the text that the vocabulary was made of.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "oscar/data/text_pattern.h"
#include "oscar/data/tokenizer_json.h"
#include "oscar/data/unicode.h"

namespace oscar {

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

}  // namespace oscar
