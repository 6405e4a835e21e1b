// An evaluation under way, its checkpoint, and all methods in one forward pass.
#include "oscar/eval/session.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/base/version.h"
#include "oscar/bundle/edit.h"
#include "oscar/bundle/match.h"
#include "oscar/eval/estimate.h"
#include "oscar/eval/evaluate.h"
#include "oscar/model/checkpoint/text.h"
#include "oscar/model/layer_major.h"
#include "oscar/text/packing.h"

namespace oscar {

// Layer-major forward of several methods.

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Keeps the reference's attention output and measures the others against it.
class OutputComparison final : public AttentionObserver {
 public:
  // Of a layer without attention, which is not observed, nothing is added.
  OutputComparison(int64_t first_query, int num_kv_heads)
      : first_query_(first_query), energy_(static_cast<size_t>(num_kv_heads)) {}

  void observe(const AttentionRecord& record) override {
    const auto o = record.o.slice(2, first_query_);
    if (!target_) {
      reference_ = o;
      energy_ = squares(o, record.k.size(1));
      return;
    }
    add(target_->error[record.layer], squares(o.sub(reference_), record.k.size(1)));
    add(target_->energy[record.layer], energy_);
  }

  void measure(OutputError& target) { target_ = &target; }
  void skip(OutputError& target, int layer) const { add(target.energy[layer], energy_); }

 private:
  // [num_kv_heads] of x [batch, num_qo_heads, tokens, d].
  static std::vector<double> squares(const torch::Tensor& x, int64_t num_kv_heads) {
    const auto heads = x.to(torch::kFloat32).square().sum({0, 2, 3}, false, torch::kFloat64);
    const auto sums = heads.view({num_kv_heads, -1}).sum(1).to(torch::kCPU);
    return {sums.data_ptr<double>(), sums.data_ptr<double>() + num_kv_heads};
  }
  static void add(std::vector<double>& sums, const std::vector<double>& more) {
    for (size_t head = 0; head < sums.size(); ++head) sums[head] += more[head];
  }

  int64_t first_query_;
  OutputError* target_ = nullptr;
  torch::Tensor reference_;
  std::vector<double> energy_;
};

int64_t state_bytes(const Transformer& model, const torch::Tensor& ids, size_t methods) {
  const int64_t element = model.compute().dtype == torch::kBFloat16 ? 2 : 4;
  return ids.numel() * model.config().hidden_size * element * static_cast<int64_t>(methods);
}

// states[m] undefined: still the reference's.
using States = std::vector<torch::Tensor>;

void advance(const Transformer& model, const MultiForward& methods, int layer,
             const LayerWeights& weights, States& states, std::vector<OutputError>& errors) {
  const bool on_cpu = !model.compute().device.is_cuda();
  OutputComparison comparison(methods.first_query, model.config().num_kv_heads);
  const auto entering = states[0];
  states[0] =
      model.forward_layer(layer, weights, entering, &comparison, nullptr, methods.position_offset);
  for (size_t m = 1; m < states.size(); ++m) {
    CacheEngine* const engine = methods.engines[m];
    const bool int2 = engine && engine->quantizes(layer);
    if (!int2 && !states[m].defined()) {
      comparison.skip(errors[m], layer);
      continue;
    }
    comparison.measure(errors[m]);
    if (on_cpu) give_back_much_freed_memory();
    states[m] = model.forward_layer(layer, weights, states[m].defined() ? states[m] : entering,
                                    &comparison, int2 ? engine : nullptr, methods.position_offset);
    if (!states[m].isfinite().all().item<bool>()) {
      throw Error({.what = "a hidden state is not finite",
                   .where = fmt::format("layer {}, method {} of the comparison", layer, m),
                   .hint = "run with --dtype fp32"});
    }
  }
  if (!states[0].isfinite().all().item<bool>()) {
    throw Error({.what = "a hidden state of the reference is not finite",
                 .where = fmt::format("layer {}", layer),
                 .hint = "run with --dtype fp32, or check the weights"});
  }
}

// How many batches pass together.
class BlockLength {
 public:
  explicit BlockLength(bool short_blocks) : most_(short_blocks ? 1 : kNoLimit) {}

  size_t most() const { return most_; }
  // `loading` of the `seconds` that a block of `batches` took went into waiting for weights.
  void took(double seconds, double loading, size_t batches) {
    constexpr double kReadingShare = 1.0 / 20, kGrowth = 8;
    if (most_ == kNoLimit) return;
    const double work = std::max(seconds - loading, 1e-9) / static_cast<double>(batches);
    const double wanted = std::ceil(loading / (kReadingShare * work));
    most_ = static_cast<size_t>(
        std::clamp(wanted, 1.0, kGrowth * static_cast<double>(std::max<size_t>(batches, 1))));
  }

 private:
  static constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();
  size_t most_;
};

}  // namespace

void run_multi_forward(Transformer& model, const MultiForward& methods,
                       const std::vector<torch::Tensor>& batches, const BatchSink& sink,
                       Progress& progress) {
  const c10::InferenceMode guard;
  const int num_layers = model.config().num_layers;
  const size_t count = methods.engines.size();
  const std::vector<std::vector<double>> zeros(
      num_layers, std::vector<double>(model.config().num_kv_heads, 0.0));
  BlockLength length(methods.short_blocks);
  const TakesItsTime until_a_batch_ends;
  LayerLoader loader(model, /*resident=*/false);
  size_t begin = 0;
  while (begin < batches.size()) {
    const Clock::time_point start = Clock::now();
    double loading = 0;
    size_t end = begin;
    for (int64_t bytes = 0; end < batches.size() && end - begin < length.most(); ++end) {
      bytes += state_bytes(model, batches[end], count);
      if (bytes > methods.hidden_state_room && end > begin) break;
    }
    std::vector<States> block;
    std::vector<std::vector<OutputError>> errors(end - begin, {count, {zeros, zeros}});
    for (size_t b = begin; b < end; ++b) {
      block.emplace_back(count);
      block.back()[0] = model.embed(batches[b]);
    }
    for (int layer = 0; layer < num_layers; ++layer) {
      const Clock::time_point loading_start = Clock::now();
      const LayerWeights& weights = loader.get(layer);
      loading += seconds_since(loading_start);
      for (size_t b = begin; b < end; ++b) {
        stop_if_requested(kStoppedEvaluation);
        advance(model, methods, layer, weights, block[b - begin], errors[b - begin]);
        progress.advance(batches[b].numel());
      }
    }
    for (size_t b = begin; b < end; ++b) {
      stop_if_requested(kStoppedEvaluation);
      States& states = block[b - begin];
      for (size_t m = 1; m < count; ++m) {
        if (!states[m].defined()) states[m] = states[0];
      }
      sink(b, states, std::move(errors[b - begin]));
      states.clear();
    }
    length.took(seconds_since(start), loading, end - begin);
    begin = end;
  }
}

// Figures as tensors of float64 in a checkpoint, and back.

namespace {

// Names the layout of the tensors below; another one is another version's.
constexpr const char* kOrder = "evaluation";
constexpr const char* kFloat64 = "f64";
constexpr int64_t kScores = 3, kSums = 2;  // fields of TokenScores and OutputError

struct Table {
  std::vector<int64_t> shape = {};
  std::vector<double> values = {};
};

void add(const std::string& name, const Table& table, std::vector<ResumeTensor>& tensors) {
  if (table.values.empty()) return;
  const auto* bytes = reinterpret_cast<const uint8_t*>(table.values.data());
  tensors.push_back({.name = name, .dtype = kFloat64, .shape = table.shape});
  tensors.back().own({bytes, bytes + table.values.size() * sizeof(double)});
}

Table score_table(const TextState& text) {
  Table scores{.shape = {static_cast<int64_t>(text.scores.size()), kScores,
                         static_cast<int64_t>(text.scores[0].nll.size())}};
  for (const TokenScores& s : text.scores) {
    for (const auto* values : {&s.nll, &s.kl, &s.agrees}) {
      scores.values.insert(scores.values.end(), values->begin(), values->end());
    }
  }
  return scores;
}

Table error_table(const TextState& text) {
  const auto& layers = text.errors[0].error;
  Table errors{.shape = {static_cast<int64_t>(text.errors.size()), kSums,
                         static_cast<int64_t>(layers.size()),
                         static_cast<int64_t>(layers[0].size())}};
  for (const OutputError& e : text.errors) {
    for (const auto* of_layers : {&e.error, &e.energy}) {
      for (const auto& values : *of_layers) {
        errors.values.insert(errors.values.end(), values.begin(), values.end());
      }
    }
  }
  return errors;
}

void add_text(const std::string& name, const TextState& text, std::vector<ResumeTensor>& tensors) {
  if (text.scores.empty()) return;
  add(name + "_scores", score_table(text), tensors);
  add(name + "_errors", error_table(text), tensors);
}

// The tensor `name`, whose last extent is free; `leading` are the others. Empty when there is none.
std::vector<double> find(const std::string& file, const std::vector<ResumeTensor>& tensors,
                         const std::string& name, const std::vector<int64_t>& leading) {
  for (const ResumeTensor& tensor : tensors) {
    if (tensor.name != name) continue;
    size_t rows = 1;
    for (const int64_t extent : leading) rows *= static_cast<size_t>(extent);
    const size_t bytes = tensor.bytes.size(), row = bytes / rows;
    std::vector<int64_t> shape = leading;
    shape.push_back(static_cast<int64_t>(row / sizeof(double)));
    if (tensor.dtype != kFloat64 || tensor.shape != shape ||
        bytes != rows * static_cast<size_t>(shape.back()) * sizeof(double)) {
      refuse_damaged_checkpoint(
          fmt::format("{}, {}", file, name), fmt::format("f64 [{}, n]", fmt::join(leading, ", ")),
          fmt::format("{} [{}], {} bytes", tensor.dtype, fmt::join(tensor.shape, ", "), bytes));
    }
    std::vector<double> values(bytes / sizeof(double));
    std::memcpy(values.data(), tensor.bytes.data(), bytes);
    return values;
  }
  return {};
}

// Cuts `values` into rows of equal length, each into its place.
void deal(const std::vector<double>& values, const std::vector<std::vector<double>*>& rows) {
  const size_t length = values.size() / rows.size();
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(i * length);
    rows[i]->assign(begin, begin + static_cast<std::ptrdiff_t>(length));
  }
}

// Of score_table and error_table.
TextState text_of(const std::vector<double>& scores, const std::vector<double>& errors,
                  const EvaluationShape& shape) {
  TextState text;
  text.scores.resize(shape.methods);
  text.errors.resize(shape.methods);
  std::vector<std::vector<double>*> places, sums;
  for (TokenScores& s : text.scores) places.insert(places.end(), {&s.nll, &s.kl, &s.agrees});
  for (OutputError& e : text.errors) {
    for (auto* of_layers : {&e.error, &e.energy}) {
      of_layers->resize(shape.layers);
      for (auto& values : *of_layers) sums.push_back(&values);
    }
  }
  deal(scores, places);
  deal(errors, sums);
  return text;
}

TextState find_text(const std::string& file, const std::vector<ResumeTensor>& tensors,
                    const std::string& name, const EvaluationShape& shape) {
  const auto count = static_cast<int64_t>(shape.methods);
  const auto scores = find(file, tensors, name + "_scores", {count, kScores});
  const auto errors =
      find(file, tensors, name + "_errors", {count, kSums, static_cast<int64_t>(shape.layers)});
  if (scores.empty() && errors.empty()) return {};
  TextState text = text_of(scores, errors, shape);
  if (const size_t heads = text.errors[0].error[0].size(); heads != shape.heads) {
    refuse_damaged_checkpoint(fmt::format("{}, {}_errors", file, name),
                              fmt::format("{} KV heads", shape.heads), fmt::format("{}", heads));
  }
  return text;
}

}  // namespace

std::vector<uint8_t> text_bytes(const TextState& text) {
  std::vector<double> values = error_table(text).values;
  const std::vector<double> scores = score_table(text).values;
  values.insert(values.end(), scores.begin(), scores.end());
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  return {bytes, bytes + values.size() * sizeof(double)};
}

TextState text_from_bytes(const std::vector<uint8_t>& bytes, const EvaluationShape& shape) {
  const size_t errors = shape.methods * kSums * shape.layers * shape.heads;
  const size_t count = bytes.size() / sizeof(double), of_token = shape.methods * kScores;
  if (count < errors || bytes.size() != count * sizeof(double) ||
      (count - errors) % of_token != 0) {
    throw Error({.what = "figures of another shape than the text's",
                 .expected = fmt::format("{} sums and {} scores a token", errors, of_token),
                 .found = fmt::format("{} bytes", bytes.size())});
  }
  std::vector<double> values(count);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(errors);
  return text_of({middle, values.end()}, {values.begin(), middle}, shape);
}

EvaluationCheckpoint::EvaluationCheckpoint(std::filesystem::path path, Bundle run)
    : path_(std::move(path)), run_(std::move(run)) {
  run_.statistics_only = true;
}

void EvaluationCheckpoint::save(const EvaluationState& state) {
  if (path_.empty()) return;
  const auto start = SavePace::Clock::now();
  ResumeState saved{.run_key = run_.run_key, .order = kOrder};
  add_text("text", state.text, saved.tensors);
  add_text("separated", state.separated, saved.tensors);
  Table margins, generated;
  for (const auto& outcomes : state.forced) {
    for (const NeedleOutcome& outcome : outcomes) margins.values.push_back(outcome.margin);
    margins.shape = {static_cast<int64_t>(state.forced.size()),
                     static_cast<int64_t>(outcomes.size())};
  }
  add("margins", margins, saved.tensors);
  generated.values.assign(state.generated.begin(), state.generated.end());
  generated.shape = {1, static_cast<int64_t>(generated.values.size())};
  add("generated", generated, saved.tensors);
  write_checkpoint(path_, run_, saved);
  pace_.saved(start);
}

void EvaluationCheckpoint::save_if_due(const EvaluationState& state) {
  if (pace_.due()) save(state);
}

std::optional<EvaluationState> EvaluationCheckpoint::load(const EvaluationShape& shape) const {
  if (path_.empty()) return std::nullopt;
  const auto saved = read_own_checkpoint(
      path_, {run_.run_key, kOrder,
              "the same model, bundles, text, options, device, threads and version"});
  if (!saved) return std::nullopt;
  const std::string file = path_.string();
  const std::vector<ResumeTensor>& tensors = saved->state.tensors;
  EvaluationState state;
  state.text = find_text(file, tensors, "text", shape);
  state.separated = find_text(file, tensors, "separated", shape);
  const auto margins = find(file, tensors, "margins", {static_cast<int64_t>(shape.methods)});
  for (size_t m = 0; m < shape.methods && !margins.empty(); ++m) {
    const size_t prompts = margins.size() / shape.methods;
    state.forced.emplace_back();
    for (size_t i = 0; i < prompts; ++i) {
      state.forced[m].push_back(needle_outcome(margins[m * prompts + i]));
    }
  }
  for (const double pass : find(file, tensors, "generated", {1})) {
    state.generated.push_back(pass != 0);
  }
  return state;
}

// Opening model, bundles and corpus, and the head of the report.

void require_served(int64_t served, int64_t offset, int64_t length, const char* option) {
  if (length <= served && offset <= served - length) return;
  throw Error({.what = "positions beyond what the model serves",
               .where = fmt::format("--position-offset, {}", option),
               .expected = fmt::format("at most {} positions", served),
               .found = fmt::format("{} + {}", offset, length),
               .hint = "lower one of them, or set --rope-scaling as the server does"});
}

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

TokenSequences open_corpus(const EvaluateOptions& options, const Session& session,
                           Progress& progress) {
  const ModelConfig& config = session.checkpoint.config;
  const int64_t served = config.rope.max_positions;
  const int64_t length =
      options.sequence_length > 0 ? options.sequence_length : std::min(served, kLongestDefault);
  require_served(served, options.position_offset, length, "--sequence-length");
  CorpusOptions corpus;
  corpus.sequence_length = static_cast<int>(length);
  corpus.max_tokens = options.max_tokens;
  corpus.seed = options.seed;
  corpus.vocab_size = config.vocab_size;
  corpus.eos_token_ids = config.eos_token_ids;
  corpus.chat_template = session.checkpoint.chat_template;
  corpus.strict = options.strict;
  const int window = corpus.sequence_length;
  if (options.stride > 0) {
    corpus.sequence_length = static_cast<int>(std::min<int64_t>(options.stride, window));
  }
  TokenSequences sequences = load_corpus(corpus_argument(options, session.checkpoint),
                                         session.tokenizer ? &*session.tokenizer : nullptr, corpus);
  for (const std::string& warning : corpus_warnings(sequences.record)) progress.warn(warning);
  if (const std::string padding = padding_warning(sequences); !padding.empty()) {
    progress.warn(padding);
  }
  if (options.stride > 0) {
    sequences.sequences = strided_windows(sequences, window, options.stride);
    sequences.record.sequence_length = window;
  }
  return sequences;
}

Bundle open_bundle(const std::filesystem::path& file, const Checkpoint& checkpoint,
                   Progress& progress) {
  Bundle bundle = read_bundle(file);
  const std::string warning = check_bundle_matches(bundle, checkpoint, file.string());
  if (!warning.empty()) progress.warn(warning);
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
  for (const std::string& note : session.checkpoint.notes) progress.note(note);
  for (const std::string& warning : session.checkpoint.warnings) progress.warn(warning);
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

// Names in order, without repetition, bf16 first.
std::vector<std::string> method_names(const EvaluateOptions& options, const Session& session) {
  auto wanted = options.compare;
  if (wanted.empty()) {
    wanted = default_methods(session.bundle ? &*session.bundle : nullptr, session.named);
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
    if (g.fitted() != local && g.attention != AttentionKind::kNone)
      elements += int64_t{g.num_kv_heads} * (g.head_dim_k + g.head_dim_v);
  }
  return elements;
}

// The windows of local layers, which no method changes; null where there are none.
Json local_windows(const ModelConfig& config) {
  const auto is_local = [](const LayerSpec& layer) { return layer.attention.local; };
  const auto first = std::ranges::find_if(config.layers, is_local);
  if (first == config.layers.end()) return nullptr;
  return {{"layers", std::ranges::count_if(config.layers, is_local)},
          {"window", first->attention.window},
          {"elements_per_token", cache_elements(config, true)}};
}

// Those of which a row is ever in 2 bits.
int64_t quantized_layers(const ModelConfig& config, const CacheFormat& quantizer) {
  int64_t count = 0;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    count += config.geometry(layer, quantizer.recent_tokens).quantized ? 1 : 0;
  }
  return count;
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
                     {"vocab_size", checkpoint.config.vocab_size},
                     {"config_sha256", checkpoint.config_sha256},
                     {"weights_fingerprint", checkpoint.weights->fingerprint(false)},
                     {"rope", checkpoint.config.rope.as_run}};
  report["model"]["quantized_layers"] = quantized_layers(checkpoint.config, session.quantizer);
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
                      {"chunk_len", session.corpus.record.sequence_length},
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
