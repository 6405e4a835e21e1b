// Opens everything, checks that it belongs together, measures, and assembles the report.
#include "oscar/eval/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "oscar/base/error.h"
#include "oscar/base/version.h"
#include "oscar/bundle/bundle_match.h"
#include "oscar/bundle/strip.h"
#include "oscar/data/checkpoint_tokenizer.h"
#include "oscar/data/corpus.h"
#include "oscar/data/separators.h"
#include "oscar/eval/cache_format.h"
#include "oscar/eval/estimate.h"
#include "oscar/eval/eval_memory.h"
#include "oscar/eval/methods.h"
#include "oscar/eval/multi_forward.h"
#include "oscar/eval/needle_run.h"
#include "oscar/eval/overlap.h"
#include "oscar/eval/report_json.h"
#include "oscar/eval/row_classes.h"
#include "oscar/eval/strided_windows.h"
#include "oscar/eval/token_scores.h"
#include "oscar/inspect/picture.h"

namespace oscar {
namespace {

constexpr const char* kHeldOutCorpus = "heldout.jsonl";
constexpr int64_t kHostBatchTokens = 4096;
constexpr int64_t kDeviceBatchTokens = 65536;
constexpr int64_t kDeviceClassTokens = 16384;  // of the pass that looks at rows by class
constexpr int64_t kLongestDefault = 4096;

// What a run has opened.
struct Session {
  Checkpoint checkpoint;
  std::optional<Tokenizer> tokenizer = {};
  std::optional<Bundle> bundle = {};
  std::vector<NamedBundle> named = {};
  TokenChunks corpus = {};
  ComputeOptions compute = {};
  MemoryLimits memory = {};
  EngineChoice engine = {};
  QuantizerSettings quantizer = {};
};

// Mode and prompt of the text task: under `prefill` the tokens before the first counted one are
// the prompt; under `chunked:N` all are.
CacheView text_view(const EvaluateOptions& options, int64_t prompt) {
  CacheView view;
  parse_cache_mode(options.mode, view);
  if (view.mode == CacheModeKind::kChunked) prompt = std::numeric_limits<int64_t>::max();
  view.prompt = view.mode == CacheModeKind::kDecode ? 0 : prompt;
  return view;
}

std::string corpus_argument(const EvaluateOptions& options, const Checkpoint& checkpoint) {
  if (!options.corpus.empty()) return options.corpus;
  const auto held_out = checkpoint.folder / kHeldOutCorpus;
  if (std::filesystem::exists(held_out)) return held_out.string();
  throw Error({.what = "no corpus to evaluate on",
               .where = checkpoint.folder.string(),
               .hint = "give held-out text or token ids with --corpus"});
}

TokenChunks open_corpus(const EvaluateOptions& options, const Session& session,
                        Progress& progress) {
  const ModelConfig& config = session.checkpoint.config;
  const int64_t served = config.rope.max_positions;
  const int64_t length =
      options.chunk_len > 0 ? options.chunk_len : std::min(served, kLongestDefault);
  if (length > served || options.position_offset > served - length) {
    throw Error({.what = "positions beyond what the model serves",
                 .where = "--position-offset, --chunk-len",
                 .expected = fmt::format("at most {} positions", served),
                 .found = fmt::format("{} + {}", options.position_offset, length),
                 .hint = "lower one of them, or set --rope-scaling as the server does"});
  }
  CorpusOptions corpus;
  corpus.chunk_len = static_cast<int>(length);
  corpus.max_tokens = options.max_tokens;
  corpus.seed = options.seed;
  corpus.vocab_size = config.vocab_size;
  corpus.eos_token_ids = config.eos_token_ids;
  corpus.chat_template_sha256 = session.checkpoint.chat_template_sha256;
  const int window = corpus.chunk_len;
  if (options.stride > 0) {
    corpus.chunk_len = static_cast<int>(std::min<int64_t>(options.stride, window));
  }
  TokenChunks chunks = load_corpus(corpus_argument(options, session.checkpoint),
                                   session.tokenizer ? &*session.tokenizer : nullptr, corpus);
  for (const CorpusSource& source : chunks.record.sources) {
    if (source.lost_bytes == 0) continue;
    progress.note(fmt::format("{}: left out {} bytes that the vocabulary cannot write", source.name,
                              source.lost_bytes));
  }
  if (options.stride > 0) {
    chunks.chunks = strided_windows(chunks, window, options.stride);
    chunks.record.chunk_len = window;
  }
  return chunks;
}

Bundle open_bundle(const std::filesystem::path& file, const Checkpoint& checkpoint,
                   Progress& progress) {
  Bundle bundle = read_bundle(file);
  const std::string warning = check_bundle_matches(bundle, checkpoint, file.string());
  if (!warning.empty()) progress.note(warning);
  return bundle;
}

Session open_session(const EvaluateOptions& options, Progress& progress) {
  Session session{.checkpoint = open_checkpoint(options.model, options.rope_scaling)};
  session.compute = choose_compute(options.device, options.dtype);
  session.memory = memory_limits(session.compute.device, options.host_memory, options.gpu_memory);
  session.engine = {parse_engine_kind(options.engine), session.compute.device};
  if (!options.bundle.empty()) {
    session.bundle = open_bundle(options.bundle, session.checkpoint, progress);
  } else if (options.write_back) {
    throw Error({.what = "there is no bundle to write the report into",
                 .where = "--write-back",
                 .hint = "name one with --bundle"});
  }
  for (const auto& [name, file] : options.named_bundles) {
    check_bundle_name(name, session.named);
    session.named.push_back({name, open_bundle(file, session.checkpoint, progress)});
  }
  if (options.needles || reads_text(corpus_argument(options, session.checkpoint))) {
    session.tokenizer = open_tokenizer(session.checkpoint);
  }
  session.quantizer = common_format(options, session.checkpoint.config.head_dim,
                                    session.bundle ? &*session.bundle : nullptr, session.named);
  check_engine(session.engine, text_view(options, 0), session.quantizer);
  session.corpus = open_corpus(options, session, progress);
  return session;
}

// Names in order, without repetition, bf16 first; sweeps and sensitivity after the rest.
std::vector<std::string> method_names(const EvaluateOptions& options, const Session& session) {
  auto wanted = options.compare;
  if (wanted.empty()) {
    wanted = default_methods(session.bundle ? &*session.bundle : nullptr, session.named);
  }
  const std::string base = wanted.back();
  const auto add = [&](const std::vector<std::string>& more) {
    wanted.insert(wanted.end(), more.begin(), more.end());
  };
  if (options.clip_sweep) add(clip_sweep(base));
  if (options.window_sweep) add(window_sweep(base));
  if (options.sensitivity) {
    add(sensitivity_methods(base, session.checkpoint.config.num_layers));
  }
  std::vector<std::string> names = {"bf16"};
  for (const std::string& name : wanted) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

std::vector<Method> build_methods(const EvaluateOptions& options, const Session& session,
                                  const CacheView& view, Progress& progress) {
  const MethodSource source{.config = &session.checkpoint.config,
                            .bundle = session.bundle ? &*session.bundle : nullptr,
                            .named = session.named,
                            .quantizer = session.quantizer,
                            .view = view,
                            .seed = options.seed,
                            .device = session.compute.device};
  const auto names = method_names(options, session);
  progress.begin("prepare", static_cast<int64_t>(names.size()), "methods");
  std::vector<Method> methods;
  for (const std::string& name : names) {
    methods.push_back(make_method(name, source));
    progress.advance(1);
  }
  progress.end();
  return methods;
}

// Consecutive sequences of one length as one tensor, up to a number of tokens.
std::vector<torch::Tensor> make_batches(const std::vector<std::vector<int32_t>>& chunks,
                                        int64_t batch_tokens) {
  std::vector<torch::Tensor> batches;
  for (size_t i = 0; i < chunks.size();) {
    const size_t length = chunks[i].size();
    size_t end = i + 1;
    while (end < chunks.size() && chunks[end].size() == length &&
           static_cast<int64_t>((end + 1 - i) * length) <= batch_tokens) {
      ++end;
    }
    auto ids =
        torch::empty({static_cast<int64_t>(end - i), static_cast<int64_t>(length)}, torch::kInt64);
    auto* out = ids.data_ptr<int64_t>();
    for (; i < end; ++i) out = std::copy(chunks[i].begin(), chunks[i].end(), out);
    batches.push_back(ids);
  }
  return batches;
}

int64_t first_measured(const EvaluateOptions& options, int64_t chunk_len,
                       const std::vector<Method>& methods) {
  int64_t windows = 1;
  for (const Method& m : methods) windows = std::max(windows, m.view.sink + m.view.recent);
  int64_t first = std::max<int64_t>(1, options.first_position.value_or(windows));
  if (options.stride > 0) first = std::max(first, chunk_len - options.stride);
  return first;
}

TextResults measure_text(const EvaluateOptions& options, const Session& session, Transformer& model,
                         const std::vector<Method>& methods,
                         const std::vector<std::vector<int32_t>>& sequences, int64_t first,
                         const char* task, Progress& progress) {
  std::vector<std::vector<int32_t>> chunks;
  TextResults results;
  results.first_position = first;
  for (const auto& chunk : sequences) {
    const int64_t measured = static_cast<int64_t>(chunk.size()) - first;
    if (measured <= 0) continue;
    chunks.push_back(chunk);
    results.measured.push_back(measured);
    results.longest = std::max(results.longest, static_cast<int64_t>(chunk.size()));
  }
  require_enough_tokens(
      std::accumulate(results.measured.begin(), results.measured.end(), int64_t{0}),
      fmt::format("perplexity from position {} on", first));
  const bool gpu = session.compute.device.is_cuda();
  const auto batches = make_batches(chunks, gpu ? kDeviceBatchTokens : kHostBatchTokens);

  std::vector<std::unique_ptr<CacheEngine>> engines;
  EvaluationSize size{.longest_sequence = results.longest, .methods = methods.size()};
  for (const auto& ids : batches) size.batch_tokens = std::max(size.batch_tokens, ids.numel());
  MultiForward forward{.engines = {},
                       .position_offset = options.position_offset,
                       .first_query = first - 1,
                       .hidden_state_room = hidden_state_room(model, size, session.memory)};
  for (const Method& method : methods) {
    engines.push_back(make_engine(method, model.config(), session.engine));
    if (engines.back()) engines.back()->set_first_position(options.position_offset);
    forward.engines.push_back(engines.back().get());
  }
  int64_t work = 0;
  for (const auto& ids : batches) work += ids.numel() * model.config().num_layers;
  results.scores.resize(methods.size());
  progress.begin(task, work, "token-layers");
  results.output_errors = run_multi_forward(
      model, forward, batches,
      [&](size_t batch, const std::vector<torch::Tensor>& hidden) {
        score_batch(model, hidden, batches[batch], first, results.scores);
      },
      progress);
  progress.end();
  return results;
}

// The same text with the checkpoint's own separators inside the history: rows that draw much
// attention, and that calibration text may hardly have. Null, with a note, when none is known.
Json measure_separated_text(const EvaluateOptions& options, const Session& session,
                            Transformer& model, const std::vector<Method>& methods, int64_t first,
                            Progress& progress) {
  const std::vector<int32_t> separators = separator_tokens(session.checkpoint);
  if (separators.empty()) {
    progress.note("no token that ends documents or turns is known: nothing was measured with one");
    return nullptr;
  }
  const auto chunks = with_separators(session.corpus.chunks, separators, options.separators);
  const TextResults text =
      measure_text(options, session, model, methods, chunks, first, "with separators", progress);
  Json report = {{"gap", options.separators}, {"token_ids", separators}};
  add_text_results(text, methods, options.seed, report);
  if (options.keep_units) add_unit_results(text, methods, report);
  const bool gpu = session.compute.device.is_cuda();
  const torch::Tensor ids = make_batches(chunks, gpu ? kDeviceClassTokens : 0).front();
  report["rows"] = row_classes_json(
      measure_row_classes(model, methods, ids, separators, options.position_offset), methods);
  return report;
}

// The prompts, before anything is measured: they may not be possible.
NeedleResults prepare_needles(const EvaluateOptions& options, const Session& session) {
  std::vector<int32_t> haystack;
  for (const auto& chunk : session.corpus.chunks) {
    const bool overlaps = options.stride > 0 && !haystack.empty();
    haystack.insert(haystack.end(), overlaps ? chunk.end() - options.stride : chunk.begin(),
                    chunk.end());
  }
  const auto folder = find_model("tiny-gqa").parent_path() / "needle";
  NeedleResults results;
  results.chat_template = known_chat_template(session.checkpoint.chat_template_sha256);
  results.prompts = make_needle_prompts(read_needle_book(folder), options.needle_plan,
                                        {&*session.tokenizer, &haystack, results.chat_template});
  return results;
}

void measure_needles(const EvaluateOptions& options, const Session& session, Transformer& model,
                     const std::vector<Method>& methods, NeedleResults& results,
                     Progress& progress) {
  int64_t tokens = 0;
  EvaluationSize size{.batch_tokens = largest_needle_batch(model, results.prompts),
                      .methods = methods.size(),
                      .all_weights = options.generate_needles};
  for (const NeedlePrompt& p : results.prompts) {
    tokens += p.length;
    size.longest_sequence = std::max(size.longest_sequence, p.length);
  }
  hidden_state_room(model, size, session.memory);  // each batch passes alone, if it fits
  progress.begin("needles", tokens * model.config().num_layers, "token-layers");
  results.forced = run_needles_forced(model, methods, session.engine, results.prompts, progress);
  progress.end();
  if (options.generate_needles) {
    progress.begin("generation", tokens * static_cast<int64_t>(methods.size()), "tokens");
    results.generated =
        run_needles_generated(model, methods, session.engine, results.prompts, progress);
    progress.end();
  }
}

// Numbers that the cache keeps of one token: keys and values of all KV heads and layers.
int64_t cache_elements(const ModelConfig& config) {
  int64_t elements = 0;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const LayerGeometry g = config.geometry(layer, 0);
    elements += int64_t{g.num_kv_heads} * (g.head_dim_k + g.head_dim_v);
  }
  return elements;
}

Json bundle_json(const Bundle& bundle, const std::filesystem::path& file) {
  return {{"file", file.filename().string()},
          {"content_sha256", bundle.content_sha256},
          {"serving_sha256", serving_sha256(bundle)},
          {"preset", bundle.preset},
          {"method", bundle.method},
          {"granularity", bundle.granularity}};
}

Json describe_session(const EvaluateOptions& options, const Session& session) {
  const Checkpoint& checkpoint = session.checkpoint;
  Json report;
  report["schema"] = "oscar-eval-1";
  report["tool"] = {{"version", kToolVersion}, {"commit", kToolCommit}};
  report["command"] = options.command;
  report["model"] = {{"name", checkpoint.name},
                     {"architecture", checkpoint.config.architecture},
                     {"num_layers", checkpoint.config.num_layers},
                     {"cache_elements_per_token", cache_elements(checkpoint.config)},
                     {"max_positions", checkpoint.config.rope.max_positions},
                     {"config_sha256", checkpoint.config_sha256},
                     {"weights_fingerprint", checkpoint.weights->fingerprint(false)},
                     {"rope", checkpoint.config.rope.as_run}};
  if (const std::string types = checkpoint.weights->quantization(); !types.empty()) {
    report["model"]["quantization"] = types;
  }
  report["bundle"] = nullptr;
  if (session.bundle) report["bundle"] = bundle_json(*session.bundle, options.bundle);
  for (size_t i = 0; i < session.named.size(); ++i) {
    const auto& [name, file] = options.named_bundles[i];
    report["bundles"][name] = bundle_json(session.named[i].bundle, file);
  }
  Json sources = Json::array();
  for (const CorpusSource& s : session.corpus.record.sources) {
    sources.push_back({{"name", std::filesystem::path(s.name).filename().string()},
                       {"sha256", s.sha256},
                       {"tokens", s.tokens_used}});
  }
  report["corpus"] = {{"sources", std::move(sources)},
                      {"tokens", session.corpus.record.tokens},
                      {"sequences", session.corpus.record.sequences_used},
                      {"chunk_len", session.corpus.record.chunk_len},
                      {"tokens_sha256", session.corpus.record.tokens_sha256}};
  report["device"] = describe(session.compute);
  report["threads"] = at::get_num_threads();
  report["seed"] = options.seed;
  report["engine"] = engine_name(session.engine.kind);
  report["mode"] = options.mode;
  report["stride"] = options.stride;
  report["position_offset"] = options.position_offset;
  report["quantizer"] = format_json(session.quantizer);
  return report;
}

}  // namespace

Json evaluate(const EvaluateOptions& options, Progress& progress) {
  CacheView view = text_view(options, 0);
  Session session = open_session(options, progress);
  Transformer model(session.checkpoint, session.compute);
  auto methods = build_methods(options, session, view, progress);
  const int64_t first = first_measured(options, session.corpus.record.chunk_len, methods);
  view = text_view(options, first);
  for (Method& method : methods) method.view.prompt = view.prompt;

  Json report = describe_session(options, session);
  const auto overlap = [&](const Bundle& bundle) {
    return overlap_json(bundle.fingerprint, session.corpus.chunks, options.needles ? 0 : first);
  };
  if (session.bundle) report["bundle"]["overlap"] = overlap(*session.bundle);
  for (const NamedBundle& named : session.named) {
    report["bundles"][named.name]["overlap"] = overlap(named.bundle);
  }
  describe_methods(methods, report);
  NeedleResults needles;
  if (options.needles) needles = prepare_needles(options, session);
  if (options.perplexity) {
    const TextResults text = measure_text(options, session, model, methods, session.corpus.chunks,
                                          first, "perplexity", progress);
    add_text_results(text, methods, options.seed, report);
    if (options.keep_units) add_unit_results(text, methods, report);
    if (options.separators > 0) {
      Json separated = measure_separated_text(options, session, model, methods, first, progress);
      if (!separated.is_null()) report["separators"] = std::move(separated);
    }
  }
  if (options.needles) {
    measure_needles(options, session, model, methods, needles, progress);
    add_needle_results(needles, methods, report);
  }
  if (session.bundle) {
    report["spectra"] = spectra_picture(*session.bundle);
    report["channels"] = channels_picture(*session.bundle);
  }
  if (options.write_back) {
    session.bundle->evaluation = report;
    write_bundle(*session.bundle, options.bundle, /*force=*/true);
  }
  return report;
}

}  // namespace oscar
