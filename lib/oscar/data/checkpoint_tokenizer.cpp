// tokenizer.json of the checkpoint's folder, or what stands for it in a GGUF file.
#include "oscar/data/checkpoint_tokenizer.h"

#include <algorithm>
#include <optional>
#include <string>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/data/added_tokens.h"
#include "oscar/data/corpus.h"
#include "oscar/data/corpus_files.h"
#include "oscar/data/separators.h"

namespace oscar {
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
         .hint = "put it into the folder, or pass ids as .npy (scripts/prepare_corpus.py)"});
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

}  // namespace oscar
