// tokenizer.json in the checkpoint's folder.
#include "oscar/data/checkpoint_tokenizer.h"

#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/data/added_tokens.h"
#include "oscar/data/corpus.h"
#include "oscar/data/corpus_files.h"
#include "oscar/data/separators.h"

namespace oscar {
namespace {

constexpr const char* kFile = "tokenizer.json";

std::vector<AddedToken> tokens_named_by(const std::filesystem::path& file) {
  try {
    const TokenizerJson json = parse_tokenizer_json(read_text_file(file), file.string());
    if (!json.is_object()) return {};
    return read_added_tokens(json.value("added_tokens", TokenizerJson()), file.string());
  } catch (const Error&) {
    return {};  // whoever reads text is told
  }
}

}  // namespace

Tokenizer open_tokenizer(const Checkpoint& checkpoint) {
  const auto file = checkpoint.folder / kFile;
  if (!std::filesystem::exists(file)) {
    throw Error(
        {.what = "text needs the model's tokenizer",
         .where = checkpoint.folder.string(),
         .expected = kFile,
         .hint = "put it into the folder, or pass ids as .npy (scripts/prepare_corpus.py)"});
  }
  return Tokenizer::from_file(file);
}

bool reads_text(const std::string& corpus_argument) {
  const std::vector<CorpusPart> parts = parse_corpus_argument(corpus_argument);
  return std::any_of(parts.begin(), parts.end(), [](const CorpusPart& part) {
    return part.self_tokens == 0 && holds_text(part.path);
  });
}

std::vector<int32_t> separator_tokens(const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config;
  return separator_tokens(config.eos_token_ids, tokens_named_by(checkpoint.folder / kFile),
                          config.vocab_size);
}

}  // namespace oscar
