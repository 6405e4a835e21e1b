// Tokenizer and corpora of a checkpoint, as programs name them.
#include "oscar/model/checkpoint/text.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/strings.h"
#include "oscar/text/corpus.h"
#include "oscar/text/packing.h"
#include "oscar/text/pre_tokenizer.h"

namespace oscar {

// tokenizer.json of the checkpoint's folder, or what stands for it in a GGUF file.

namespace {

std::string source_of(const Checkpoint& checkpoint) {
  return (checkpoint.is_gguf() ? checkpoint.path : checkpoint.folder / "tokenizer.json").string();
}

// tokenizer.json's document; absent when the checkpoint has none.
std::optional<TokenizerJson> document_of(const Checkpoint& checkpoint) {
  const auto text = read_tokenizer_json(checkpoint.path);
  if (!text) return std::nullopt;
  return parse_tokenizer_json(*text, source_of(checkpoint));
}

std::vector<AddedToken> tokens_named_by(const Checkpoint& checkpoint) {
  try {
    const auto json = document_of(checkpoint);
    if (!json || !json->is_object()) return {};
    return read_added_tokens(json->value("added_tokens", TokenizerJson()), source_of(checkpoint));
  } catch (const Error&) {
    return {};  // whoever reads text is told
  }
}

}  // namespace

Tokenizer open_tokenizer(const Checkpoint& checkpoint) {
  const auto document = document_of(checkpoint);
  if (!document) {
    throw Error(
        {.what = "text needs the model's tokenizer",
         .where = source_of(checkpoint),
         .hint =
             "put it into the folder, or pass ids as .npy (python -m oscar_int2 prepare-corpus)"});
  }
  return Tokenizer::from_json(*document, source_of(checkpoint));
}

bool reads_text(const std::string& corpus_argument) {
  const std::vector<CorpusPart> parts = parse_corpus_argument(corpus_argument);
  return std::any_of(parts.begin(), parts.end(), [](const CorpusPart& part) {
    return part.self_tokens == 0 && holds_text(part.path);
  });
}

std::vector<int32_t> separator_tokens(const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config;
  return separator_tokens(config.eos_token_ids, tokens_named_by(checkpoint), config.vocab_size);
}

// Parsing of CORPUS arguments: paths, weights and self:N.

namespace {

constexpr const char* kSyntax = "PATH[:WEIGHT][,PATH[:WEIGHT]...], or self:N alone";

[[noreturn]] void malformed(const std::string& what, const std::string& part) {
  throw UsageError({.what = what, .where = "CORPUS '" + part + "'", .expected = kSyntax});
}

double parse_weight(const std::string& text, const std::string& part) {
  char* end = nullptr;
  const double weight = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(weight) || weight <= 0) {
    malformed("corpus weight '" + text + "' is not a positive number", part);
  }
  return weight;
}

CorpusPart parse_part(const std::string& text, const std::string& argument) {
  if (text.empty()) malformed("empty part of a corpus argument", argument);
  CorpusPart part;
  std::string rest = text;
  const bool is_self = text.rfind("self:", 0) == 0;
  if (is_self) rest = text.substr(5);
  const size_t colon = rest.rfind(':');
  const size_t slash = rest.rfind('/');
  if (colon != std::string::npos && (slash == std::string::npos || colon > slash)) {
    part.weight = parse_weight(rest.substr(colon + 1), text);
    part.has_weight = true;
    rest.resize(colon);
  }
  if (!is_self) {
    if (rest.empty()) malformed("empty part of a corpus argument", argument);
    part.path = rest;
    return part;
  }
  constexpr int64_t kMost = int64_t{1} << 40;
  part.self_tokens = parse_count(rest).value_or(0);
  if (part.self_tokens <= 0 || part.self_tokens > kMost) {
    malformed("self:N needs a positive number of tokens", text);
  }
  return part;
}

}  // namespace

std::vector<CorpusPart> parse_corpus_argument(const std::string& argument) {
  std::vector<CorpusPart> parts;
  for (size_t begin = 0; begin <= argument.size();) {
    const size_t comma = std::min(argument.find(',', begin), argument.size());
    parts.push_back(parse_part(argument.substr(begin, comma - begin), argument));
    begin = comma + 1;
  }
  for (const CorpusPart& part : parts) {
    if (part.has_weight != parts.front().has_weight) {
      malformed("give every part of a corpus a weight, or none", argument);
    }
  }
  return parts;
}

}  // namespace oscar
