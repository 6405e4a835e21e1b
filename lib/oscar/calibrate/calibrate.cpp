// The order of the job: open, read, plan, collect, fit, write.
#include "oscar/calibrate/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <mutex>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/base/interrupt.h"
#include "oscar/base/parallel.h"
#include "oscar/base/sha256.h"
#include "oscar/base/version.h"
#include "oscar/bundle/bundle_file.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/calibrate/assemble.h"
#include "oscar/calibrate/convergence_stage.h"
#include "oscar/calibrate/corpus_source.h"
#include "oscar/calibrate/cost_estimate.h"
#include "oscar/calibrate/resume.h"
#include "oscar/calibrate/shared_collection.h"
#include "oscar/calibrate/shared_search.h"
#include "oscar/calibrate/split_corpus.h"
#include "oscar/calibrate/statistics_pass.h"
#include "oscar/checkpoint/weight_table.h"
#include "oscar/executor/own_part.h"
#include "oscar/fit/convergence.h"
#include "oscar/fit/presets.h"
#include "oscar/search/pass.h"
#include "oscar/stacks/pooled_clips.h"
#include "oscar/stacks/stack.h"

namespace oscar {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr int kLongestDefaultChunk = 4096;
constexpr int64_t kBatchTokensCpu = 4096, kBatchTokensGpu = 32768;

// Options with every "auto" replaced by what this model and machine make of it.
CalibrateOptions resolve(CalibrateOptions options, const ModelConfig& config,
                         const ComputeOptions& compute) {
  if (options.chunk_len == 0) {
    options.chunk_len = std::min(kLongestDefaultChunk, config.rope.max_positions);
  }
  if (options.chunk_len > config.rope.max_positions) {
    throw Error({.what = "chunks would be longer than the model's context",
                 .where = "--chunk-len",
                 .expected = fmt::format("at most {}", config.rope.max_positions),
                 .found = std::to_string(options.chunk_len)});
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
  if (options.quantizer.quant_group_size == 0) options.quantizer.quant_group_size = config.head_dim;
  if (config.head_dim % options.quantizer.quant_group_size != 0) {
    throw Error({.what = "the quantization group does not divide the head",
                 .where = "--quant-group-size",
                 .expected = fmt::format("a divisor of {}", config.head_dim),
                 .found = std::to_string(options.quantizer.quant_group_size)});
  }
  if (options.batch_tokens == 0) {
    options.batch_tokens = compute.device.is_cuda() ? kBatchTokensGpu : kBatchTokensCpu;
  }
  return options;
}

// Said when the exact windows leave nothing to quantize; else "".
std::string window_warning(const QuantizerSettings& quantizer, int max_positions) {
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
void run_pass(Transformer& model, const TokenChunks& corpus, const RunPlan& plan, RunPosition start,
              LayerVisitor& visitor, CheckpointFile& saved, const char* done_again,
              Progress& progress) {
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

// The statistics that the fit needs, from the checkpoint on when there is one, with `run` begun
// when the one that it is of was. They are in the checkpoint once complete, unless all that follows
// is a short fit.
Collected collect(Transformer& model, const TokenChunks& corpus, const RunPlan& plan,
                  const CalibrateOptions& options, CheckpointFile& saved, Bundle& run, Ranks& ranks,
                  Progress& progress) {
  const std::vector<LayerGeometry> layers = geometries(options, model.config());
  const auto attended = attended_view(options);
  // Beside a GPU that has all weights there are processors and memory for it.
  const bool beside_compute = plan.weights_resident && model.compute().device.is_cuda();
  auto moments = std::make_unique<MomentPass>(
      model, layers,
      [&](const MomentPass& sums, const RunPosition& next) {
        const bool stop = interrupt_requested();
        if (!saved.due(next, plan, stop)) return;
        if (beside_compute && !stop) {
          saved.save_meanwhile(sums.block(), next, sums.blocks_before(), sums.snapshots());
        } else {
          saved.save(sums.block(), next, sums.blocks_before(), sums.snapshots());
        }
      },
      SumMarks{plan.block_tokens, plan.snapshot_tokens}, attended);
  std::optional<SavedRun> resumed;
  if (options.resume) {
    resumed = saved.load(plan);
    if (!resumed) {
      progress.note("no checkpoint beside " + options.output.string() + ": starting anew");
    }
  }
  RunPosition start;
  bool energy_saved = false;  // with complete moments only
  if (resumed) {
    run.created_utc = resumed->started_utc;
    moments->restore(resumed->statistics, resumed->before, std::move(resumed->snapshots));
    start = std::move(resumed->position);
    energy_saved = start.batch == plan.batches.size() && has_energy(resumed->statistics);
    if (!energy_saved) resumed.reset();  // the sums are in the collectors
  }
  const int64_t token_layers = corpus.record.tokens * model.config().num_layers;
  progress.begin("collecting statistics", token_layers, "token-layers");
  ranks.agree(run.run_key, start_json(start, false));
  Collected collected;
  try {
    if (ranks.several()) {
      const auto save = [&](const Collected& sums, const RunPosition& next, bool stop) {
        if (!saved.due(next, plan, stop)) return;
        if (stop) {
          saved.save(sums.statistics, next, {}, sums.snapshots);
        } else {
          saved.save_meanwhile(sums.statistics, next, {}, sums.snapshots);
        }
      };
      collected = collect_with_others(ranks, {model, corpus, plan, layers, attended},
                                      std::move(moments), std::move(start), save, progress);
    } else {
      run_layer_major(model, corpus, plan, std::move(start), *moments, progress);
      saved.settle();  // its copies of sums, before more are made
      collected = {moments->result(), moments->snapshots()};
    }
  } catch (const Interrupted&) {
    throw resumable_stop(saved, ranks.several() ? kBlocksAgain : kCollecting);
  }
  progress.end();
  auto& [statistics, snapshots] = collected;
  check_counts(statistics, corpus.record.tokens);

  const RunPosition complete{plan.batches.size(), 0, {}};
  if (!wants_energy(options)) {
    if (!options.search.any()) return collected;
    // Beside a GPU, processors are left for it while the text is judged and the search begins.
    if (model.compute().device.is_cuda()) {
      saved.save_meanwhile(statistics, complete, {}, snapshots);
    } else {
      saved.save(statistics, complete, {}, snapshots);
    }
    return collected;
  }
  if (energy_saved) return {std::move(resumed->statistics), std::move(snapshots)};
  saved.save(statistics, complete, {}, snapshots);
  EnergyPass energy(statistics, model.compute().device);
  progress.begin("second pass: value energy", token_layers, "token-layers");
  run_pass(model, corpus, plan, {}, energy, saved, kEnergyAgain, progress);
  progress.end();
  energy.store(statistics);
  saved.save(statistics, complete, {}, snapshots);
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

struct Decided {
  std::vector<LayerDecision> decisions;
  std::vector<LayerStatistics> statistics;  // with the sums of what was held back
};

// Decides on the held-back text. With the energy objective, whose weights come from sums that are
// complete, no sums are added, and no statistics returned.
Decided decide(Transformer& model, const SplitCorpus& split, const RunPlan& plan,
               int layers_together, const CalibrateOptions& options, Ranks& ranks,
               CheckpointFile& saved, const std::vector<LayerStatistics>& statistics,
               Progress& progress) {
  const std::vector<LayerGeometry> layers = geometries(options, model.config());
  const std::vector<bool> own = own_layers(ranks, layers);
  SearchPass search(model, statistics, search_settings(options), split.num_search,
                    split.num_confirm, layers_together, own);
  progress.begin("searching", split.held_back.record.tokens * model.config().num_layers,
                 "token-layers");
  Decided decided;
  if (wants_energy(options)) {
    run_pass(model, split.held_back, plan, {}, search, saved, kSearchAgain, progress);
    decided.decisions = take_decisions(search, ranks, layers, saved);
    fit_decisions_of_others(own, statistics, options.fit, model.config().rope, decided.decisions);
  } else {
    MomentPass all(model, layers, {}, {}, attended_view(options));
    all.restore(statistics);
    Both both(search, all);
    run_pass(model, split.held_back, plan, {}, both, saved, kSearchAgain, progress);
    decided.decisions = take_decisions(search, ranks, layers, saved);
    decided.statistics = all.result();
  }
  progress.end();
  return decided;
}

}  // namespace

CalibrateResult calibrate(const CalibrateOptions& requested, Ranks& ranks, Progress& progress) {
  std::optional<RunOutput> output;
  if (!requested.dry_run && ranks.first()) output.emplace(requested);
  const Checkpoint checkpoint = open_checkpoint(requested.model, requested.rope_scaling);
  const LongInputs weights(checkpoint.weights->shards());
  const ComputeOptions compute = own_compute(ranks, requested.device, requested.dtype, progress);
  CalibrateOptions options = resolve(requested, checkpoint.config, compute);
  const MemoryLimits limits =
      own_memory(ranks, compute.device, options.host_memory, options.gpu_memory);
  CalibrateResult result;
  if (options.dry_run && !ranks.first()) return result;
  Transformer model(checkpoint, compute);
  result.device = describe(compute);
  const std::string left_out = left_out_note(checkpoint.config, *checkpoint.weights);
  if (!left_out.empty()) progress.note(left_out);
  if (const std::string types = checkpoint.weights->quantization(); !types.empty()) {
    progress.note("weights are stored in " + types);
  }
  const std::string warning =
      window_warning(options.quantizer, checkpoint.config.rope.max_positions);
  if (!warning.empty()) result.warnings.push_back(warning);
  const TokenChunks corpus = make_chunks(options, options.chunk_len, checkpoint, model,
                                         limits.of_compute(compute.device), progress);
  result.corpus = corpus.record;
  if (!options.tokens_out.empty() && ranks.first()) {
    const std::string uneven = write_chunks_npy(corpus, options.tokens_out);
    if (!uneven.empty()) result.warnings.push_back(uneven);
  }
  const SplitCorpus split = split_corpus(corpus, options, result.warnings);
  result.held_back_tokens = split.held_back.record.tokens;
  // Before the work, so that a limit that is too low for the search is told then; and before what
  // takes less, so that it is told at once.
  std::optional<RunPlan> search_plan;
  if (options.search.any()) search_plan = plan_search(model, split, options, limits);
  std::vector<Batch> batches = plan_batches(split.fit.chunks, options.batch_tokens);
  PassNeeds needs{.checkpoint_every = options.checkpoint_every,
                  .snapshot_tokens = plan_snapshots(batches),
                  .attended = attended_view(options).has_value(),
                  .processes = ranks.size(),
                  .search_bytes = {}};
  const RunPlan plan = plan_run(model, std::move(batches), limits, std::move(needs));
  if (options.dry_run) {
    result.dry_run = true;
    result.cost = estimate_cost(model, split, plan, options, limits, ranks);
    return result;
  }
  hold_device_memory(limits, compute.device);

  Bundle bundle = describe_run(options, checkpoint, corpus.record);
  bundle.fingerprint = fingerprint_of(corpus.chunks);
  if (options.search.any()) {
    bundle.search = describe_search(options, split.num_search, split.num_confirm,
                                    split.held_back.record.tokens);
  }
  bundle.run_key = run_key(options, bundle, compute);
  bundle.created_utc = utc_now();
  if (!ranks.first()) {
    const Json start = ranks.agree(bundle.run_key, {});
    if (start.at(2).get<bool>()) return result;
    const std::vector<LayerGeometry> layers = geometries(options, model.config());
    const auto attended = attended_view(options);
    collect_for_first(ranks, {model, split.fit, plan, layers, attended},
                      {start.at(0), start.at(1)});
    if (search_plan) {
      const int together = layers_searched_together(model, split, *search_plan, options, limits);
      search_for_first(ranks, model, split, *search_plan, together, options);
    }
    ranks.done();
    return result;
  }
  if (options.resume && is_finished_output(options, bundle)) {
    ranks.agree(bundle.run_key, start_json({}, true));
    ranks.wait_until_taken();
    CheckpointFile(options, bundle).remove_if_own();
    result.already_done = true;
    return result;
  }

  const auto collect_start = Clock::now();
  CheckpointFile saved(
      options, bundle,
      snapshot_bytes(checkpoint.config, plan.snapshot_tokens.size() + 1, plan.attended) +
          (plan.weights_resident ? 0 : plan.waves.front().tokens * plan.hidden_bytes_per_token));
  auto [statistics, snapshots] =
      collect(model, split.fit, plan, options, saved, bundle, ranks, progress);
  if (search_plan) send_statistics(ranks, statistics);
  result.collect_seconds = seconds_since(collect_start);
  // Beside a GPU the processors judge the text while the search begins.
  const bool beside_search = search_plan && compute.device.is_cuda();
  SilentProgress silent;
  auto judged = std::async(beside_search ? std::launch::async : std::launch::deferred,
                           [&, &snapshots = snapshots, &statistics = statistics] {
                             const auto start = Clock::now();
                             Json record = judge_convergence(
                                 snapshots, statistics, plan, options.fit, checkpoint.config.rope,
                                 search_plan.has_value(), beside_search ? silent : progress);
                             result.convergence_seconds = seconds_since(start);
                             return record;
                           });
  const auto take_judgement = [&] {
    try {
      bundle.convergence = judged.get();
    } catch (const Interrupted&) {
      throw resumable_stop(saved, kSearchAgain);
    }
  };
  if (!beside_search) take_judgement();

  const int64_t layers = checkpoint.config.num_layers;
  std::vector<LayerDecision> decisions(static_cast<size_t>(layers));
  if (search_plan) {
    const auto search_start = Clock::now();
    const int together = layers_searched_together(model, split, *search_plan, options, limits);
    Decided decided =
        decide(model, split, *search_plan, together, options, ranks, saved, statistics, progress);
    if (beside_search) take_judgement();
    decisions = std::move(decided.decisions);
    if (!decided.statistics.empty()) statistics = std::move(decided.statistics);
    result.search_seconds = seconds_since(search_start);
  }
  snapshots.clear();
  // Hadamard's and the identity are the same for every text.
  const bool follows_text = options.search.kind || options.fit.kind == TransformKind::kOscar ||
                            options.fit.kind == TransformKind::kBalanced;
  if (follows_text && needs_more_text(bundle.convergence)) {
    const auto lines = convergence_lines(bundle.convergence);
    result.warnings.push_back(lines.at(0) + " " + lines.at(1));
  }
  if (options.statistics_only) {
    decisions.clear();
  } else if (!options.search.any() || !wants_energy(options)) {
    const auto fit_start = Clock::now();
    progress.begin("fitting", layers, "layers");
    std::mutex advancing;
    parallel_for(layers, [&, &statistics = statistics](int64_t index) {
      const auto layer = static_cast<size_t>(index);
      // Without a search the sums are not saved any more: the short fit ends first.
      if (options.search.any() && interrupt_requested()) return;
      decisions[layer] = fit_again(std::move(decisions[layer]), statistics[layer], options.fit,
                                   checkpoint.config.rope);
      const std::lock_guard<std::mutex> lock(advancing);
      progress.advance(1);
    });
    if (options.search.any() && interrupt_requested()) throw resumable_stop(saved, kSearchAgain);
    progress.end();
    result.fit_seconds = seconds_since(fit_start);
  }
  for (LayerDecision& decision : decisions) {
    const auto& warnings = decision.main.warnings;
    result.warnings.insert(result.warnings.end(), warnings.begin(), warnings.end());
    bundle.layers.push_back(std::move(decision.main));
    bundle.portable.push_back(std::move(decision.portable));
  }
  if (options.search.clip && options.search.clip_scope != ClipScope::kHead) {
    const auto pooled = pool_own_clips(bundle, options.search.clip_scope);
    bundle.search["pooled_clip"] = pooled_clip_record(pooled);
  }
  if (options.keep_statistics || options.statistics_only) bundle.statistics = std::move(statistics);
  weights.require_unchanged();
  saved.settle();  // the memory of one file is planned
  write_bundle(bundle, output->file());
  saved.remove();
  result.bundle = std::move(bundle);
  return result;
}

}  // namespace oscar
