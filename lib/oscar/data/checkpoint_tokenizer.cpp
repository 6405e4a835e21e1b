// tokenizer.json of the checkpoint's folder, or what stands for it in a GGUF file.
#include "oscar/data/checkpoint_tokenizer.h"

#include <algorithm>

#include "oscar/base/error.h"
#include "oscar/data/corpus.h"

namespace oscar {

Tokenizer open_tokenizer(const Checkpoint& checkpoint) {
  const auto text = read_tokenizer_json(checkpoint.path);
  const std::string source =
      (checkpoint.is_gguf() ? checkpoint.path : checkpoint.folder / "tokenizer.json").string();
  if (!text) {
    throw Error(
        {.what = "text needs the model's tokenizer",
         .where = source,
         .hint = "put it into the folder, or pass ids as .npy (scripts/prepare_corpus.py)"});
  }
  return Tokenizer::from_text(*text, source);
}

bool reads_text(const std::string& corpus_argument) {
  const std::vector<CorpusPart> parts = parse_corpus_argument(corpus_argument);
  return std::any_of(parts.begin(), parts.end(), [](const CorpusPart& part) {
    if (part.self_tokens > 0) return false;
    const auto extension = std::filesystem::path(part.path).extension();
    return extension != ".npy" && extension != ".h5";
  });
}

}  // namespace oscar
