// The acts of the job: open, collect, decide, write; and what other processes do of it.
#include "oscar/calibrate/calibrate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <chrono>
#include <future>
#include <mutex>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/base/sha256.h"
#include "oscar/base/version.h"
#include "oscar/bundle/backend_plan.h"
#include "oscar/bundle/backends.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/match.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/calibrate/assemble.h"
#include "oscar/calibrate/collector.h"
#include "oscar/calibrate/corpus.h"
#include "oscar/calibrate/cost_estimate.h"
#include "oscar/calibrate/resume.h"
#include "oscar/calibrate/search/pass.h"
#include "oscar/calibrate/several_processes.h"
#include "oscar/fit/convergence.h"
#include "oscar/fit/fit.h"
#include "oscar/fit/moments.h"
#include "oscar/model/checkpoint/weights.h"
#include "oscar/model/layer_major.h"
#include "oscar/text/packing.h"

namespace oscar {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr int kLongestDefaultSequence = 4096;
constexpr int64_t kBatchTokensCpu = 4096, kBatchTokensGpu = 32768;

// Options with every "auto" replaced by what this model and machine make of it.
CalibrateOptions resolve(CalibrateOptions options, const ModelConfig& config,
                         const ComputeOptions& compute) {
  if (options.sequence_length == 0) {
    options.sequence_length = std::min(kLongestDefaultSequence, config.rope.max_positions);
  }
  if (options.sequence_length > config.rope.max_positions) {
    throw Error({.what = "sequences would be longer than the model's context",
                 .where = "--sequence-length",
                 .expected = fmt::format("at most {}", config.rope.max_positions),
                 .found = std::to_string(options.sequence_length)});
  }
  if (options.fit.position_span < 0) options.fit.position_span = config.rope.max_positions;
  if (options.fit.position_span > config.rope.max_positions) {
    throw Error({.what = "positions beyond what the model serves",
                 .where = "--position-span",
                 .expected = fmt::format("at most {}", config.rope.max_positions),
                 .found = std::to_string(options.fit.position_span),
                 .hint = "leave it out, or set --rope-scaling as the server does"});
  }
  if (!options.quant_group_sizes.empty()) {
    options.quantizer.quant_group_size = group_size_for(options.quant_group_sizes, config.head_dim);
  }
  if (!options.statistics_only && (config.head_dim % 8 != 0 || config.head_dim > kMaxHeadDim)) {
    throw Error({.what = "2-bit rows do not hold heads of this size",
                 .where = options.model + ": head_dim",
                 .expected = fmt::format("a multiple of 8, at most {}", kMaxHeadDim),
                 .found = std::to_string(config.head_dim),
                 .hint = "--statistics-only writes the sums of its attention"});
  }
  if (options.quantizer.quant_group_size == 0) options.quantizer.quant_group_size = config.head_dim;
  if (config.head_dim % options.quantizer.quant_group_size != 0) {
    const bool of_backend = !options.quant_group_sizes.empty();
    throw Error({.what = "the quantization group does not divide the head",
                 .where = of_backend ? "--for" : "--quant-group-size",
                 .expected = fmt::format("a divisor of {}, the model's head_dim", config.head_dim),
                 .found = of_backend ? fmt::format("{}: the groups that this backend takes",
                                                   fmt::join(options.quant_group_sizes, ", "))
                                     : std::to_string(options.quantizer.quant_group_size),
                 .hint = of_backend ? "oscar-bundle backends lists what each backend takes" : ""});
  }
  if (options.batch_tokens == 0) {
    options.batch_tokens = compute.device.is_cuda() ? kBatchTokensGpu : kBatchTokensCpu;
  }
  return options;
}

// Said when the exact windows leave nothing to quantize; else "".
std::string window_warning(const CacheFormat& quantizer, int max_positions) {
  const int64_t exact = int64_t{quantizer.sink_tokens} + quantizer.recent_tokens;
  if (exact < max_positions) return "";
  return fmt::format(
      "nothing will ever be quantized: {} sink and {} recent tokens stay exact, and the model "
      "serves {} positions; lower --sink or --recent",
      quantizer.sink_tokens, quantizer.recent_tokens, max_positions);
}

// What is done again when a pass was stopped and the run is resumed; one process collects nothing
// again.
constexpr const char* kCollecting = "";
constexpr const char* kBlocksAgain = ": eighths of the text that were in progress begin again";
constexpr const char* kEnergyAgain = ": the second pass, over value energies, begins again";
constexpr const char* kSearchAgain = ": statistics are complete, the search begins again";

// What a run that was stopped says: how to continue, and what is done again.
Interrupted resumable_stop(CheckpointFile& saved, const char* done_again) {
  saved.wait();
  return Interrupted(fmt::format(
      "{}. What was collected is in {};\n  repeat the command with --resume to continue{}",
      kStopped, saved.path().string(), done_again));
}

// run_layer_major; when it was stopped, the message says how to continue and what is done again.
void run_pass(Transformer& model, const TokenSequences& corpus, const RunPlan& plan,
              RunPosition start, LayerVisitor& visitor, CheckpointFile& saved,
              const char* done_again, Progress& progress) {
  try {
    run_layer_major(model, corpus, plan, std::move(start), visitor, progress);
  } catch (const Interrupted&) {
    throw resumable_stop(saved, done_again);
  }
}

bool has_energy(const std::vector<LayerStatistics>& statistics) {
  return std::none_of(statistics.begin(), statistics.end(), [](const LayerStatistics& s) {
    return s.geometry.fitted() && s.v_energy_moment.empty();
  });
}

// What the first tells the others.
Json start_json(const RunPosition& start, bool finished) {
  return {start.batch, start.hidden.size(), finished};
}

// What all steps of collecting share.
struct Collection {
  Transformer& model;
  const TokenSequences& corpus;
  const CollectionPlan& plan;
  const CalibrateOptions& options;
  CheckpointFile& saved;
  Progress& progress;

  int64_t token_layers() const { return corpus.record.tokens * model.config().num_layers; }
  bool on_gpu() const { return model.compute().device.is_cuda(); }
};

// The pass of one process, which saves what it has summed.
std::unique_ptr<MomentPass> moment_pass(const Collection& job,
                                        const std::vector<LayerGeometry>& layers,
                                        const std::optional<CacheView>& attended) {
  // Beside a GPU that has all weights there are processors and memory for it.
  const bool beside_compute = job.plan.memory.weights_resident && job.on_gpu();
  return std::make_unique<MomentPass>(
      job.model, layers,
      [&job, beside_compute](const MomentPass& sums, const RunPosition& next) {
        const bool stop = interrupt_requested();
        if (!job.saved.due(next, job.plan, stop)) return;
        if (beside_compute && !stop) {
          job.saved.save_meanwhile(sums.block(), next, sums.blocks_before(), sums.snapshots());
        } else {
          job.saved.save(sums.block(), next, sums.blocks_before(), sums.snapshots());
        }
      },
      SumMarks{job.plan.block_tokens, job.plan.snapshot_tokens}, attended);
}

// Where collecting begins.
struct Begin {
  RunPosition position;
  std::vector<LayerStatistics> complete;  // with energies too: nothing is left to collect
};

// With --resume from the checkpoint on: `moments` then have its sums, and `run` begins when the run
// that it is of began.
Begin begin_collecting(const Collection& job, MomentPass& moments, Bundle& run) {
  if (!job.options.resume) return {};
  std::optional<SavedRun> resumed = job.saved.load(job.plan);
  if (!resumed) {
    job.progress.note("no checkpoint beside " + job.options.output.string() + ": starting anew");
    return {};
  }
  run.created_utc = resumed->started_utc;
  moments.restore(resumed->statistics, resumed->before, std::move(resumed->snapshots));
  Begin begin{.position = std::move(resumed->position), .complete = {}};
  if (begin.position.batch == job.plan.batches.size() && has_energy(resumed->statistics)) {
    begin.complete = std::move(resumed->statistics);
  }
  return begin;
}

// All moments of the text, passed from `start` on by all processes.
Collected collect_moments(const Collection& job, const std::vector<LayerGeometry>& layers,
                          const std::optional<CacheView>& attended,
                          std::unique_ptr<MomentPass> moments, RunPosition start, Ranks& ranks) {
  const auto save = [&job](const Collected& sums, const RunPosition& next, bool stop) {
    if (!job.saved.due(next, job.plan, stop)) return;
    if (stop) {
      job.saved.save(sums.statistics, next, {}, sums.snapshots);
    } else {
      job.saved.save_meanwhile(sums.statistics, next, {}, sums.snapshots);
    }
  };
  try {
    if (ranks.several()) {
      return collect_with_others(ranks, {job.model, job.corpus, job.plan, layers, attended},
                                 std::move(moments), std::move(start), save, job.progress);
    }
    run_layer_major(job.model, job.corpus, job.plan, std::move(start), *moments, job.progress);
    job.saved.settle();  // its copies of sums, before more are made
    return {moments->result(), moments->snapshots()};
  } catch (const Interrupted&) {
    throw resumable_stop(job.saved, ranks.several() ? kBlocksAgain : kCollecting);
  }
}

// The second pass, over the text again.
void add_energies(const Collection& job, std::vector<LayerStatistics>& statistics) {
  EnergyPass energy(statistics, job.model.compute().device);
  job.progress.begin("second pass: value energy", job.token_layers(), "token-layers");
  run_pass(job.model, job.corpus, job.plan, {}, energy, job.saved, kEnergyAgain, job.progress);
  job.progress.end();
  energy.store(statistics);
}

// Act 2. The statistics that the fit needs, with `run` begun when the run that is resumed was. They
// are in the checkpoint once complete, unless all that follows is a short fit.
Collected collect(const Collection& job, Bundle& run, Ranks& ranks) {
  const std::vector<LayerGeometry> layers = geometries(job.options, job.model.config());
  const auto attended = attended_view(job.options);
  std::unique_ptr<MomentPass> moments = moment_pass(job, layers, attended);
  Begin begin = begin_collecting(job, *moments, run);
  job.progress.begin("collecting statistics", job.token_layers(), "token-layers");
  ranks.agree(run.run_key, start_json(begin.position, false));
  Collected collected =
      collect_moments(job, layers, attended, std::move(moments), std::move(begin.position), ranks);
  job.progress.end();
  auto& [statistics, snapshots] = collected;
  check_counts(statistics, job.corpus.record.tokens);
  add_gates_to_metrics(job.model, statistics);
  if (!begin.complete.empty()) return {std::move(begin.complete), std::move(snapshots)};
  if (!wants_energy(job.options) && !job.options.search.any()) return collected;

  const RunPosition complete{job.plan.batches.size(), 0, {}};
  // Beside a GPU, processors are left for it while the text is judged and the search begins.
  if (job.on_gpu() && !wants_energy(job.options)) {
    job.saved.save_meanwhile(statistics, complete, {}, snapshots);
  } else {
    job.saved.save(statistics, complete, {}, snapshots);
  }
  if (wants_energy(job.options)) {
    add_energies(job, statistics);
    job.saved.save(statistics, complete, {}, snapshots);
  }
  return collected;
}

// Two visitors in one pass.
class Both final : public LayerVisitor {
 public:
  Both(LayerVisitor& first, LayerVisitor& second) : first_(first), second_(second) {}

  AttentionObserver* observer(int layer) override {
    now_ = {first_.observer(layer), second_.observer(layer)};
    return now_.first && now_.second ? &now_ : now_.first ? now_.first : now_.second;
  }
  void layer_done(const RunPosition& next) override {
    first_.layer_done(next);
    second_.layer_done(next);
  }

 private:
  struct Observers final : AttentionObserver {
    Observers() = default;
    Observers(AttentionObserver* a, AttentionObserver* b) : first(a), second(b) {}
    void observe(const AttentionRecord& record) override {
      first->observe(record);
      second->observe(record);
    }
    AttentionObserver *first = nullptr, *second = nullptr;
  };

  LayerVisitor &first_, &second_;
  Observers now_;
};

// Once the searches that run on have ended, in the other processes too.
std::vector<LayerDecision> take_decisions(SearchPass& search, Ranks& ranks,
                                          const std::vector<LayerGeometry>& layers,
                                          CheckpointFile& saved) {
  try {
    std::vector<LayerDecision> decisions = search.take_decisions();
    receive_decisions(ranks, layers, decisions);
    return decisions;
  } catch (const Interrupted&) {
    throw resumable_stop(saved, kSearchAgain);
  }
}

struct Searched {
  std::vector<LayerDecision> decisions;
  std::vector<LayerStatistics> statistics;  // with the sums of what was held back
};

// Searches on the held-back text. With the energy objective, whose weights come from sums that are
// complete, no sums are added, and no statistics returned.
Searched search_held_back(Transformer& model, const SplitCorpus& split, const RunPlan& plan,
                          const CalibrateOptions& options, Ranks& ranks, CheckpointFile& saved,
                          const std::vector<LayerStatistics>& statistics, Progress& progress) {
  const std::vector<LayerGeometry> layers = geometries(options, model.config());
  const std::vector<bool> own = own_layers(ranks, layers);
  SearchPass search(model, statistics, search_settings(options), split.num_search,
                    split.num_confirm, plan.memory.side_by_side, own);
  progress.begin("searching", split.held_back.record.tokens * model.config().num_layers,
                 "token-layers");
  Searched found;
  if (wants_energy(options)) {
    run_pass(model, split.held_back, plan, {}, search, saved, kSearchAgain, progress);
    found.decisions = take_decisions(search, ranks, layers, saved);
    fit_decisions_of_others(own, statistics, options.fit, model.config().rope, found.decisions);
  } else {
    MomentPass all(model, layers, {}, {}, attended_view(options));
    all.restore(statistics);
    Both both(search, all);
    run_pass(model, split.held_back, plan, {}, both, saved, kSearchAgain, progress);
    found.decisions = take_decisions(search, ranks, layers, saved);
    found.statistics = all.result();
    add_gates_to_metrics(model, found.statistics);
  }
  progress.end();
  return found;
}

// Act 1. What is there before any work: output, checkpoint, device, memory, options without "auto".
struct Opened {
  Opened(const CalibrateOptions& requested, Ranks& ranks, Progress& progress)
      : checkpoint(open_checkpoint(requested.model, requested.rope_scaling)),
        weights(checkpoint.weights->shards()),
        compute(own_compute(ranks, requested.device, requested.dtype, progress)),
        options(resolve(requested, checkpoint.config, compute)),
        limits(own_memory(ranks, compute.device, options.host_memory, options.gpu_memory)) {}

  Checkpoint checkpoint;
  LongInputs weights;
  ComputeOptions compute;
  CalibrateOptions options;
  MemoryLimits limits;
};

// The text, what of it is held back, and how it passes through the model.
struct Planned {
  CorpusRecord record;
  TextProblem problem;
  NgramFingerprint fingerprint;  // none in a dry run
  SplitCorpus split;
  CollectionPlan plan;                 // of what is collected from
  std::optional<RunPlan> search_plan;  // of what is held back; none: nothing is searched
};

Planned read_and_plan(Opened& run, Transformer& model, Ranks& ranks, CalibrateResult& result,
                      Progress& progress) {
  CalibrateOptions& options = run.options;  // the search goes where the text is too short for it
  const Checkpoint& checkpoint = run.checkpoint;
  for (const std::string& note : checkpoint.notes) progress.note(note);
  for (const std::string& warning : checkpoint.warnings) progress.warn(warning);
  if (const std::string types = checkpoint.weights->quantization(); !types.empty()) {
    progress.note("weights are stored in " + types);
  }
  const std::string warning =
      window_warning(options.quantizer, checkpoint.config.rope.max_positions);
  if (!warning.empty()) result.warnings.push_back(warning);
  const TokenSequences corpus =
      make_sequences(options, options.sequence_length, checkpoint, model, run.limits, progress);
  if (const std::string padding = padding_warning(corpus); !padding.empty()) {
    result.warnings.push_back(padding);
  }
  if (!options.tokens_out.empty() && ranks.first()) {
    const std::string uneven = write_sequences_npy(corpus, options.tokens_out);
    if (!uneven.empty()) result.warnings.push_back(uneven);
  }
  TextProblem problem = text_problem(options, corpus);
  if (!problem.what.empty()) result.warnings.push_back(problem.what + problem.hint);
  Planned planned{.record = corpus.record,
                  .problem = std::move(problem),
                  .fingerprint = {},
                  .split = split_corpus(corpus, options, result.warnings),
                  .plan = {},
                  .search_plan = {}};
  // Before the work, so that a limit that is too low for the search is told then; and before what
  // takes less, so that it is told at once.
  if (options.search.any()) {
    planned.search_plan = plan_search(model, planned.split, options, run.limits);
  }
  planned.plan =
      plan_collection(model, planned.split.fit.sequences, options, run.limits, ranks.size());
  if (!options.dry_run) planned.fingerprint = fingerprint_of(corpus.sequences);
  return planned;
}

// The bundle before its layers: how it is made, and the key of the run.
Bundle begin_bundle(const Opened& run, const Planned& planned) {
  const SplitCorpus& split = planned.split;
  Bundle bundle = describe_run(run.options, run.checkpoint, planned.record);
  bundle.fingerprint = planned.fingerprint;
  if (run.options.search.any()) {
    bundle.search = describe_search(run.options.search, run.options.seed, split.num_search,
                                    split.num_confirm, split.held_back.record.tokens);
  }
  bundle.run_key = run_key(run.options, bundle, run.compute);
  bundle.created_utc = utc_now();
  return bundle;
}

// What the other processes do: they collect and search for the first.
void help_first(const Opened& run, Transformer& model, const Planned& planned,
                const std::string& key, Ranks& ranks) {
  const Json start = ranks.agree(key, {});
  if (start.at(2).get<bool>()) return;
  const std::vector<LayerGeometry> layers = geometries(run.options, model.config());
  const auto attended = attended_view(run.options);
  collect_for_first(ranks, {model, planned.split.fit, planned.plan, layers, attended},
                    {start.at(0), start.at(1)});
  if (planned.search_plan) {
    search_for_first(ranks, model, planned.split, *planned.search_plan, run.options);
  }
  ranks.done();
}

// Whether the text was enough, judged from the sums that were collected. Beside a GPU the
// processors judge while the search begins.
class Judgement {
 public:
  Judgement(const Collected& collected, const Opened& run, const Planned& planned,
            Progress& progress)
      : beside_search_(planned.search_plan && run.compute.device.is_cuda()),
        record_(std::async(
            beside_search_ ? std::launch::async : std::launch::deferred,
            [&collected, &run, &planned, &progress, this] {
              const auto start = Clock::now();
              SilentProgress silent;
              Json record = planned.problem.what.empty()
                                ? judge_convergence(
                                      collected.snapshots, collected.statistics, planned.plan,
                                      run.options.fit, run.checkpoint.config.rope,
                                      planned.search_plan.has_value(),
                                      beside_search_ ? static_cast<Progress&>(silent) : progress)
                                : convergence_record({}, planned.split.fit.record.tokens,
                                                     planned.problem.what);
              seconds_ = seconds_since(start);
              return record;
            })) {}

  bool beside_search() const { return beside_search_; }
  // Waits. Throws Interrupted that says how to continue.
  Json take(CheckpointFile& saved) {
    try {
      return record_.get();
    } catch (const Interrupted&) {
      throw resumable_stop(saved, kSearchAgain);
    }
  }
  double seconds() const { return seconds_; }

 private:
  bool beside_search_;
  double seconds_ = 0;
  std::future<Json> record_;  // ends before what it writes
};

// Act 3. The transforms of all layers: searched on held-back text, and fitted to all of it.
// `collected` gets the sums of what was held back; `bundle` the judgement on the text.
std::vector<LayerDecision> decide(const Opened& run, Transformer& model, const Planned& planned,
                                  Collected& collected, Bundle& bundle, CheckpointFile& saved,
                                  Ranks& ranks, CalibrateResult& result, Progress& progress) {
  const CalibrateOptions& options = run.options;
  Judgement judgement(collected, run, planned, progress);
  if (!judgement.beside_search()) bundle.convergence = judgement.take(saved);
  const int64_t layers = run.checkpoint.config.num_layers;
  std::vector<LayerDecision> decisions(static_cast<size_t>(layers));
  if (planned.search_plan) {
    const auto start = Clock::now();
    Searched found = search_held_back(model, planned.split, *planned.search_plan, options, ranks,
                                      saved, collected.statistics, progress);
    if (judgement.beside_search()) bundle.convergence = judgement.take(saved);
    decisions = std::move(found.decisions);
    if (!found.statistics.empty()) collected.statistics = std::move(found.statistics);
    result.search_seconds = seconds_since(start);
  }
  result.convergence_seconds = judgement.seconds();
  collected.snapshots.clear();
  if (options.statistics_only) return {};
  if (options.search.any() && wants_energy(options)) return decisions;  // fitted in the search
  const auto start = Clock::now();
  progress.begin("fitting", layers, "layers");
  std::mutex advancing;
  parallel_for(layers, [&](int64_t index) {
    const auto layer = static_cast<size_t>(index);
    // Without a search the sums are not saved any more: the short fit ends first.
    if (options.search.any() && interrupt_requested()) return;
    decisions[layer] = fit_again(std::move(decisions[layer]), collected.statistics[layer],
                                 options.fit, run.checkpoint.config.rope);
    const std::lock_guard<std::mutex> lock(advancing);
    progress.advance(1);
  });
  if (options.search.any() && interrupt_requested()) throw resumable_stop(saved, kSearchAgain);
  progress.end();
  result.fit_seconds = seconds_since(start);
  return decisions;
}

// What a user must hear of the text.
void warn_of_text(const CalibrateOptions& options, const Json& convergence,
                  std::vector<std::string>& warnings) {
  // Hadamard's and the identity are the same for every text.
  const bool follows_text = options.search.kind || options.fit.kind == TransformKind::kOscar ||
                            options.fit.kind == TransformKind::kBalanced;
  if (!follows_text || !needs_more_text(convergence)) return;
  const auto lines = convergence_lines(convergence);
  warnings.push_back(lines.at(0) + " " + lines.at(1));
}

// Act 4. All of it into the bundle, and the bundle to disk.
void write(const Opened& run, std::vector<LayerDecision> decisions, Collected collected,
           Bundle& bundle, CheckpointFile& saved, RunOutput& output, CalibrateResult& result) {
  const CalibrateOptions& options = run.options;
  for (LayerDecision& decision : decisions) {
    const auto& warnings = decision.main.warnings;
    result.warnings.insert(result.warnings.end(), warnings.begin(), warnings.end());
    bundle.layers.push_back(std::move(decision.main));
    bundle.portable.push_back(std::move(decision.portable));
  }
  if (!bundle.layers.empty() && !has_quantized_layer(bundle)) {
    result.warnings.push_back(std::string(kNothingQuantized) + ", so the bundle changes nothing");
  }
  if (!options.search.row_weights) {
    bundle.row_weights = used_row_weights(collected.statistics, options.fit);
  }
  if (options.search.clip && options.search.clip_scope != ClipScope::kHead) {
    const auto pooled = pool_own_clips(bundle, options.search.clip_scope);
    bundle.search["pooled_clip"] = pooled_clip_record(pooled);
  }
  if (options.keep_statistics || options.statistics_only) {
    bundle.statistics = std::move(collected.statistics);
    for (LayerStatistics& layer : bundle.statistics) layer.gate_moment = {};  // M_O holds it
  }
  run.weights.require_unchanged();
  saved.settle();  // the memory of one file is planned
  write_bundle(bundle, output.file());
  saved.remove();
}

// Bytes of copies of the sums, and of hidden states on the host, that a checkpoint writes.
int64_t checkpoint_bytes(const Opened& run, const CollectionPlan& plan) {
  const int64_t hidden =
      plan.memory.weights_resident ? 0 : plan.waves.front().tokens * plan.hidden_bytes_per_token;
  return snapshot_bytes(run.checkpoint.config, plan.snapshot_tokens.size() + 1, plan.attended) +
         hidden;
}

}  // namespace

CalibrateResult calibrate(const CalibrateOptions& requested, Ranks& ranks, Progress& progress) {
  std::optional<RunOutput> output;
  if (!requested.dry_run && ranks.first()) output.emplace(requested);
  Opened run(requested, ranks, progress);
  CalibrateResult result;
  if (run.options.dry_run && !ranks.first()) return result;
  Transformer model(run.checkpoint, run.compute);
  result.device = describe(run.compute);
  const Planned planned = read_and_plan(run, model, ranks, result, progress);
  result.corpus = planned.record;
  result.held_back_tokens = planned.split.held_back.record.tokens;
  if (run.options.dry_run) {
    result.dry_run = true;
    result.cost =
        estimate_cost(model, planned.split, planned.plan,
                      planned.search_plan ? &*planned.search_plan : nullptr, run.options, ranks);
    return result;
  }
  hold_device_memory(run.limits, run.compute.device);

  Bundle bundle = begin_bundle(run, planned);
  if (!ranks.first()) {
    help_first(run, model, planned, bundle.run_key, ranks);
    return result;
  }
  if (run.options.resume && is_finished_output(run.options, bundle)) {
    ranks.agree(bundle.run_key, start_json({}, true));
    ranks.wait_until_taken();
    CheckpointFile(run.options, bundle).remove_if_own();
    result.already_done = true;
    return result;
  }

  const auto start = Clock::now();
  CheckpointFile saved(run.options, bundle, checkpoint_bytes(run, planned.plan));
  Collected collected = collect(
      {model, planned.split.fit, planned.plan, run.options, saved, progress}, bundle, ranks);
  if (planned.search_plan) send_statistics(ranks, collected.statistics);
  result.collect_seconds = seconds_since(start);
  auto decisions = decide(run, model, planned, collected, bundle, saved, ranks, result, progress);
  warn_of_text(run.options, bundle.convergence, result.warnings);
  write(run, std::move(decisions), std::move(collected), bundle, saved, *output, result);
  result.bundle = std::move(bundle);
  return result;
}

}  // namespace oscar
