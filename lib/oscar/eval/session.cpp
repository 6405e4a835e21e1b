// Opening model, bundles and corpus, and the head of the report.
#include "oscar/eval/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "oscar/base/error.h"
#include "oscar/base/version.h"
#include "oscar/bundle/bundle_match.h"
#include "oscar/bundle/strip.h"
#include "oscar/data/checkpoint_tokenizer.h"
#include "oscar/eval/cache_format.h"
#include "oscar/eval/strided_windows.h"
#include "oscar/executor/own_part.h"

namespace oscar {
namespace {

constexpr const char* kHeldOutCorpus = "heldout.jsonl";
constexpr int64_t kLongestDefault = 4096;

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

}  // namespace

// Mode and prompt of the text task: under `prefill` the tokens before the first counted one are
// the prompt; under `chunked:N` all are.
CacheView text_view(const EvaluateOptions& options, int64_t prompt) {
  CacheView view;
  parse_cache_mode(options.mode, view);
  if (view.mode == CacheModeKind::kChunked) prompt = std::numeric_limits<int64_t>::max();
  view.prompt = view.mode == CacheModeKind::kDecode ? 0 : prompt;
  return view;
}

Session open_session(const EvaluateOptions& options, const Ranks& ranks, Progress& progress) {
  Checkpoint checkpoint = open_checkpoint(options.model, options.rope_scaling);
  LongInputs weights(checkpoint.weights->shards());
  Session session{.checkpoint = std::move(checkpoint), .weights = std::move(weights)};
  session.compute = own_compute(ranks, options.device, options.dtype, progress);
  session.memory =
      own_memory(ranks, session.compute.device, options.host_memory, options.gpu_memory);
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

namespace {

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
    add(sensitivity_methods(base, session.checkpoint.config));
  }
  std::vector<std::string> names = {"bf16"};
  for (const std::string& name : wanted) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

}  // namespace

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

namespace {

// Numbers that the cache keeps of one token: keys and values of all KV heads, of the layers that
// are local, or of all others.
int64_t cache_elements(const ModelConfig& config, bool local) {
  int64_t elements = 0;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const LayerGeometry g = config.geometry(layer, 0);
    if (g.fitted() != local) elements += int64_t{g.num_kv_heads} * (g.head_dim_k + g.head_dim_v);
  }
  return elements;
}

// The windows of local layers, which no method changes; null where there are none.
Json local_windows(const ModelConfig& config) {
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const AttentionSpec& attention = config.layer(layer).attention;
    if (!attention.local) continue;
    return {{"layers", config.num_layers - config.num_fitted_layers()},
            {"window", attention.window},
            {"elements_per_token", cache_elements(config, true)}};
  }
  return nullptr;
}

Json bundle_json(const Bundle& bundle, const std::filesystem::path& file) {
  return {{"file", file.filename().string()},
          {"content_sha256", bundle.content_sha256},
          {"serving_sha256", serving_sha256(bundle)},
          {"preset", bundle.preset},
          {"method", bundle.method},
          {"granularity", bundle.granularity}};
}

}  // namespace

Json describe_session(const EvaluateOptions& options, const Session& session) {
  const Checkpoint& checkpoint = session.checkpoint;
  Json report;
  report["schema"] = "oscar-eval-1";
  report["tool"] = {{"version", kToolVersion}, {"commit", kToolCommit}};
  report["command"] = options.command;
  report["model"] = {{"name", checkpoint.name},
                     {"architecture", checkpoint.config.architecture},
                     {"num_layers", checkpoint.config.num_layers},
                     {"cache_elements_per_token", cache_elements(checkpoint.config, false)},
                     {"max_positions", checkpoint.config.rope.max_positions},
                     {"config_sha256", checkpoint.config_sha256},
                     {"weights_fingerprint", checkpoint.weights->fingerprint(false)},
                     {"rope", checkpoint.config.rope.as_run}};
  if (const std::string types = checkpoint.weights->quantization(); !types.empty()) {
    report["model"]["quantization"] = types;
  }
  if (Json windows = local_windows(checkpoint.config); !windows.is_null()) {
    report["model"]["local_windows"] = std::move(windows);
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

}  // namespace oscar
