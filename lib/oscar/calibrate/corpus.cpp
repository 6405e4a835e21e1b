// The text of a run, and what of it is held back.
#include "oscar/calibrate/corpus.h"

#include <fmt/format.h>
#include <algorithm>
#include <optional>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/calibrate/search/candidates.h"
#include "oscar/model/checkpoint/text.h"
#include "oscar/model/transformer.h"
#include "oscar/text/packing.h"
#include "oscar/text/repeats.h"

namespace oscar {

// The split by options.

SplitCorpus split_corpus(const TokenSequences& corpus, CalibrateOptions& options,
                         std::vector<std::string>& warnings) {
  if (options.statistics_only) options.search = {};
  if (!options.search.any()) return {.fit = corpus, .held_back = {}};
  const HeldBack split = hold_back(corpus.sequences, options.quantizer);
  if (!split.reason.empty()) {
    warnings.push_back(split.reason);
    options.search = {};
    return {.fit = corpus, .held_back = {}};
  }
  std::vector<size_t> held = split.search;
  held.insert(held.end(), split.confirm.begin(), split.confirm.end());
  return {.fit = select_sequences(corpus, split.fit),
          .held_back = select_sequences(corpus, held),
          .num_search = split.search.size(),
          .num_confirm = split.confirm.size()};
}

TextProblem text_problem(const CalibrateOptions& options, const TokenSequences& corpus) {
  size_t longest = 0;
  for (const auto& sequence : corpus.sequences) longest = std::max(longest, sequence.size());
  const CacheFormat& cache = options.quantizer;
  const size_t exact =
      static_cast<size_t>(cache.sink_tokens) + static_cast<size_t>(cache.recent_tokens);
  if (attended_view(options) && longest <= exact) {
    return {
        fmt::format("no sequence is longer than the exact windows ({} + {} tokens)",
                    cache.sink_tokens, cache.recent_tokens),
        ": no row is in 2 bits, so rows are weighted evenly and keys have no centers; use longer "
        "sequences"};
  }
  const double repeated = repeated_share(corpus.sequences);
  if (repeated > kMostRepeated) {
    return {fmt::format("{:.0f}% of the text repeats earlier text", 100 * repeated),
            fmt::format(", in stretches of {} tokens: halves of it are alike, so the verdict on it "
                        "would mean nothing; leave copies out",
                        kRepeatedTokens)};
  }
  return {};
}

HeldBackSize held_back_size(const SplitCorpus& split) {
  HeldBackSize size{.tokens = split.held_back.record.tokens,
                    .search_sequences = static_cast<int64_t>(split.num_search)};
  for (const auto& sequence : split.held_back.sequences) {
    size.longest_sequence = std::max(size.longest_sequence, static_cast<int64_t>(sequence.size()));
  }
  return size;
}

SearchSettings search_settings(const CalibrateOptions& options) {
  return {.fit = options.fit,
          .search = options.search,
          .quantizer = options.quantizer,
          .seed = options.seed};
}

std::vector<LayerGeometry> geometries(const CalibrateOptions& options, const ModelConfig& config) {
  std::vector<LayerGeometry> layers;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    layers.push_back(config.geometry(layer, options.quantizer.recent_tokens));
  }
  return layers;
}

std::optional<CacheView> attended_view(const CalibrateOptions& options) {
  const SearchOptions& search = options.search;
  const bool wanted =
      options.fit.row_weights == RowWeights::kAttention || search.row_weights || search.key_centers;
  if (!wanted) return {};
  return cache_view(options.quantizer);
}

bool wants_energy(const CalibrateOptions& options) {
  return options.fit.objective_v == ValueObjective::kEnergy;
}

// Corpus files through the tokenizer, or sampling from the model.

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

TokenSequences sample_sequences(const CorpusOptions& corpus, int64_t tokens, Transformer& model,
                                const MemoryLimits& limits, Progress& progress) {
  plan_memory({.streamed_layers = all_layer_bytes(model),
               .least = "CORPUS self:N, which keeps all layers",
               .hint = "sample with your server and pass the token ids as .npy"},
              limits, model.compute().device);
  const int64_t length = std::min<int64_t>(corpus.sequence_length, tokens);
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
  return pack_documents(documents, std::move(source), corpus);
}

}  // namespace

TokenSequences make_sequences(const CalibrateOptions& options, int sequence_length,
                              const Checkpoint& checkpoint, Transformer& model,
                              const MemoryLimits& limits, Progress& progress) {
  CorpusOptions corpus{.sequence_length = sequence_length,
                       .max_tokens = options.max_tokens,
                       .seed = options.seed,
                       .vocab_size = checkpoint.config.vocab_size,
                       .eos_token_ids = checkpoint.config.eos_token_ids,
                       .chat_template = checkpoint.chat_template,
                       .strict = options.strict};
  const std::vector<CorpusPart> parts = parse_corpus_argument(options.corpus);
  std::optional<Tokenizer> tokenizer;
  if (reads_text(options.corpus)) tokenizer = open_tokenizer(checkpoint);
  const std::vector<int32_t> separators = separator_tokens(checkpoint);
  using enum CalibrateOptions::Change;
  const CacheFormat& cache = options.quantizer;
  const bool long_enough =
      sequence_length >= kRecallWindows * (cache.sink_tokens + cache.recent_tokens);
  corpus.recall = options.recall == kOn || (options.recall == kAuto && tokenizer && long_enough);
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
    return sample_sequences(corpus, part.self_tokens, model, limits, progress);
  }
  TokenSequences sequences = load_corpus(options.corpus, tokenizer ? &*tokenizer : nullptr, corpus);
  for (const std::string& warning : corpus_warnings(sequences.record)) progress.warn(warning);
  if (!separators.empty() && sequences.record.separators == "none" &&
      is_rare(sequences.sequences, separators)) {
    progress.note(fmt::format(
        "{} of {} tokens end a document or a turn. In service such tokens draw much attention:\n"
        "  add text with them (chats, packed documents), or use --separators on",
        count_tokens(sequences.sequences, separators), sequences.record.tokens));
  }
  return sequences;
}

}  // namespace oscar
