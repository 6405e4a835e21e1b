// Corpus files through the tokenizer, or sampling from the model.
#include "oscar/calibrate/corpus_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "oscar/base/error.h"
#include "oscar/data/checkpoint_tokenizer.h"
#include "oscar/data/separators.h"
#include "oscar/executor/run_plan.h"
#include "oscar/model/generate.h"

namespace oscar {
namespace {

// Sequences sampled side by side: more only costs memory.
constexpr int64_t kSequencesAtOnce = 32;

int32_t start_token(const ModelConfig& config) {
  if (config.bos_token_id) return *config.bos_token_id;
  if (!config.eos_token_ids.empty()) return config.eos_token_ids.front();
  throw Error({.what = "the checkpoint names neither a BOS nor an EOS token to start from",
               .where = "CORPUS self:N",
               .hint = "write a corpus beforehand and pass its token ids as .npy"});
}

TokenChunks sample_chunks(const CorpusOptions& corpus, int64_t tokens, Transformer& model,
                          int64_t device_bytes, Progress& progress) {
  const int64_t needed = all_layer_bytes(model);
  if (needed > device_bytes) {
    throw Error({.what = "self:N needs all weights in memory at once",
                 .where = "CORPUS self:N",
                 .expected = fmt::format("{:.1f} GiB", static_cast<double>(needed) / (1 << 30)),
                 .found = fmt::format("{:.1f} GiB", static_cast<double>(device_bytes) / (1 << 30)),
                 .hint = "sample with your serving stack and pass the token ids as .npy"});
  }
  const int64_t length = std::min<int64_t>(corpus.chunk_len, tokens);
  const int64_t sequences = (tokens + length - 1) / length;
  std::vector<std::vector<int32_t>> documents;
  progress.begin("sampling", sequences * (length - 1), "tokens");
  for (int64_t done = 0; done < sequences; done += kSequencesAtOnce) {
    const GenerateOptions options{.num_sequences = std::min(kSequencesAtOnce, sequences - done),
                                  .length = length,
                                  .first_token = start_token(model.config()),
                                  .temperature = 1.0,
                                  .seed = corpus.seed + static_cast<uint64_t>(done)};
    for (auto& sequence : generate(model, options, progress)) {
      documents.push_back(std::move(sequence));
    }
  }
  progress.end();
  CorpusSource source;
  source.name = fmt::format("self:{}", tokens);
  source.kind = "self";
  return pack_documents(std::move(documents), std::move(source), corpus);
}

}  // namespace

TokenChunks make_chunks(const CalibrateOptions& options, int chunk_len,
                        const Checkpoint& checkpoint, Transformer& model, int64_t device_bytes,
                        Progress& progress) {
  CorpusOptions corpus{.chunk_len = chunk_len,
                       .max_tokens = options.max_tokens,
                       .seed = options.seed,
                       .vocab_size = checkpoint.config.vocab_size,
                       .eos_token_ids = checkpoint.config.eos_token_ids,
                       .chat_template_sha256 = checkpoint.chat_template_sha256,
                       .model = options.model};
  const std::vector<CorpusPart> parts = parse_corpus_argument(options.corpus);
  std::unique_ptr<Tokenizer> tokenizer;
  if (reads_text(options.corpus)) {
    tokenizer = std::make_unique<Tokenizer>(open_tokenizer(checkpoint));
  }
  const std::vector<int32_t> separators =
      separator_tokens(corpus.eos_token_ids, tokenizer.get(), corpus.vocab_size);
  using enum CalibrateOptions::Separators;
  if (options.separators == kOn || (options.separators == kAuto && tokenizer)) {
    corpus.separators = separators;
    corpus.only_if_rare = options.separators == kAuto;
    if (separators.empty() && options.separators == kOn) {
      throw Error({.what = "no token that ends documents or turns is known",
                   .where = "--separators on",
                   .hint = "leave it out"});
    }
  }
  for (const CorpusPart& part : parts) {
    if (part.self_tokens == 0) continue;
    if (parts.size() > 1) {
      throw Error({.what = "self:N cannot be joined with other sources",
                   .where = "CORPUS " + options.corpus,
                   .hint = "write it to ids first: --dry-run --tokens-out ids.npy"});
    }
    return sample_chunks(corpus, part.self_tokens, model, device_bytes, progress);
  }
  TokenChunks chunks = load_corpus(options.corpus, tokenizer.get(), corpus);
  if (!separators.empty() && chunks.record.separators == "none" &&
      is_rare(chunks.chunks, separators)) {
    progress.note(fmt::format(
        "{} of {} tokens end a document or a turn. In service such tokens draw much attention:\n"
        "  add text with them (chats, packed documents), or use --separators on",
        count_tokens(chunks.chunks, separators), chunks.record.tokens));
  }
  return chunks;
}

}  // namespace oscar
