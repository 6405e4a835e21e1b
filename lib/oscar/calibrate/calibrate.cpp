// The order of the job: open, read, plan, collect, fit, write.
#include "oscar/calibrate/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/base/interrupt.h"
#include "oscar/base/sha256.h"
#include "oscar/base/version.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/calibrate/assemble.h"
#include "oscar/calibrate/convergence_stage.h"
#include "oscar/calibrate/corpus_source.h"
#include "oscar/calibrate/resume.h"
#include "oscar/calibrate/statistics_pass.h"
#include "oscar/fit/convergence.h"
#include "oscar/fit/presets.h"
#include "oscar/search/held_back.h"
#include "oscar/search/memory.h"
#include "oscar/search/pass.h"
#include "oscar/stacks/pooled_clips.h"

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

MemoryLimits memory_limits(const CalibrateOptions& options, const ComputeOptions& compute) {
  MemoryLimits limits = free_memory(compute.device);
  if (options.host_memory > 0) limits.host_bytes = options.host_memory;
  if (options.gpu_memory > 0) limits.device_bytes = options.gpu_memory;
  return limits;
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

std::vector<LayerGeometry> geometries(const CalibrateOptions& options, const ModelConfig& config) {
  std::vector<LayerGeometry> layers;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    layers.push_back(config.geometry(layer, options.quantizer.recent_tokens));
  }
  return layers;
}

bool wants_energy(const CalibrateOptions& options) {
  return options.fit.objective_v == ValueObjective::kEnergy;
}

// What is done again when a pass was stopped and the run is resumed; collecting loses nothing.
constexpr const char* kCollecting = "";
constexpr const char* kEnergyAgain = ": the second pass, over value energies, begins again";
constexpr const char* kSearchAgain = ": statistics are complete, the search begins again";

// run_layer_major; when it was stopped, the message says how to continue and what is done again.
void run_pass(Transformer& model, const TokenChunks& corpus, const RunPlan& plan, RunPosition start,
              LayerVisitor& visitor, const CheckpointFile& saved, const char* done_again,
              Progress& progress) {
  try {
    run_layer_major(model, corpus, plan, std::move(start), visitor, progress);
  } catch (const Interrupted&) {
    throw Interrupted(fmt::format(
        "{}. What was collected is in {};\n  repeat the command with --resume to continue{}",
        kStopped, saved.path().string(), done_again));
  }
}

bool has_energy(const std::vector<LayerStatistics>& statistics) {
  return std::none_of(statistics.begin(), statistics.end(),
                      [](const LayerStatistics& s) { return s.v_energy_moment.empty(); });
}

struct Collected {
  std::vector<LayerStatistics> statistics;  // of all layers
  SumSnapshots snapshots;
};

// The statistics that the fit needs, from the checkpoint on when there is one. They are in the
// checkpoint once complete, unless all that follows is a short fit.
Collected collect(Transformer& model, const TokenChunks& corpus, const RunPlan& plan,
                  const CalibrateOptions& options, CheckpointFile& saved, Progress& progress) {
  MomentPass moments(
      model, geometries(options, model.config()),
      [&](const MomentPass& sums, const RunPosition& next) {
        if (saved.due(next, plan, interrupt_requested())) {
          saved.save(sums.result(), next, sums.snapshots());
        }
      },
      plan.snapshot_tokens);
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
    moments.restore(resumed->statistics, std::move(resumed->snapshots));
    start = std::move(resumed->position);
    energy_saved = start.batch == plan.batches.size() && has_energy(resumed->statistics);
    if (!energy_saved) resumed.reset();  // the sums are in the collectors
  }
  const int64_t token_layers = corpus.record.tokens * model.config().num_layers;
  progress.begin("collecting statistics", token_layers, "token-layers");
  run_pass(model, corpus, plan, std::move(start), moments, saved, kCollecting, progress);
  progress.end();
  Collected collected{moments.result(), moments.snapshots()};
  auto& [statistics, snapshots] = collected;
  check_counts(statistics, corpus.record.tokens);

  const RunPosition complete{plan.batches.size(), 0, {}};
  if (!wants_energy(options)) {
    if (options.search.any()) saved.save(statistics, complete, snapshots);
    return collected;
  }
  if (energy_saved) return {std::move(resumed->statistics), std::move(snapshots)};
  saved.save(statistics, complete, snapshots);
  EnergyPass energy(statistics, model.compute().device);
  progress.begin("second pass: value energy", token_layers, "token-layers");
  run_pass(model, corpus, plan, {}, energy, saved, kEnergyAgain, progress);
  progress.end();
  energy.store(statistics);
  saved.save(statistics, complete, snapshots);
  return collected;
}

// What the fit sees, and what the search sees, search half first; empty: no search.
struct SplitCorpus {
  TokenChunks fit, held_back;
  size_t num_search = 0, num_confirm = 0;
};

SplitCorpus split_corpus(const TokenChunks& corpus, CalibrateOptions& options,
                         std::vector<std::string>& warnings) {
  if (options.statistics_only) options.search = {};
  if (!options.search.any()) return {.fit = corpus, .held_back = {}};
  const HeldBack split = hold_back(corpus.chunks, options.quantizer, options.search.full);
  if (!split.reason.empty()) {
    warnings.push_back(split.reason);
    options.search = {};
    return {.fit = corpus, .held_back = {}};
  }
  std::vector<size_t> held = split.search;
  held.insert(held.end(), split.confirm.begin(), split.confirm.end());
  return {.fit = select_chunks(corpus, split.fit),
          .held_back = select_chunks(corpus, held),
          .num_search = split.search.size(),
          .num_confirm = split.confirm.size()};
}

// Held-back chunks are few, and a layer is searched once all of them have passed it: one shard.
RunPlan plan_search(const Transformer& model, const SplitCorpus& split,
                    const CalibrateOptions& options, const MemoryLimits& limits) {
  constexpr int kAllChunks = 1 << 20;
  RunPlan plan = plan_run(model, plan_batches(split.held_back.chunks, options.batch_tokens), limits,
                          kAllChunks);
  return in_one_shard(std::move(plan), model.compute().device);
}

SearchSettings search_settings(const CalibrateOptions& options) {
  return {.fit = options.fit,
          .search = options.search,
          .quantizer = options.quantizer,
          .seed = options.seed};
}

// Times the smallest possible search of layer 0, a chunk in each half, and scales it.
double estimate_search_seconds(Transformer& model, const SplitCorpus& split,
                               const CalibrateOptions& options,
                               const std::vector<LayerStatistics>& first_layer) {
  SearchPass pass(model, first_layer, search_settings(options), 1, 1);
  const auto weights = model.load_layer(0);
  const auto start = Clock::now();
  for (const size_t chunk : {size_t{0}, split.num_search}) {
    const auto length = static_cast<int64_t>(split.held_back.chunks[chunk].size());
    const Batch batch{static_cast<int64_t>(chunk), 1, length};
    const torch::Tensor ids = batch_ids(split.held_back, batch);
    model.forward_layer(0, *weights, model.embed(ids.to(model.compute().device)), pass.observer(0));
  }
  pass.layer_done({});
  const double pairs = static_cast<double>(split.num_search + split.num_confirm) / 2;
  return seconds_since(start) * pairs * model.config().num_layers;
}

// Raises the peaks to what a search takes: its own pass over the held-back chunks, and what it
// holds of them.
void add_search_memory(const Transformer& model, const SplitCorpus& split,
                       const CalibrateOptions& options, const MemoryLimits& limits,
                       CostEstimate& cost) {
  const torch::Device device = model.compute().device;
  RunPlan plan = plan_search(model, split, options, limits);
  HeldBackSize held_back{.tokens = split.held_back.record.tokens,
                         .search_chunks = static_cast<int64_t>(split.num_search)};
  for (const auto& chunk : split.held_back.chunks) {
    held_back.longest_chunk = std::max(held_back.longest_chunk, static_cast<int64_t>(chunk.size()));
  }
  (device.is_cuda() ? plan.peak_device_bytes : plan.peak_host_bytes) +=
      search_memory_bytes(model.config(), held_back, options.search.full, device);
  cost.peak_host_bytes = std::max(cost.peak_host_bytes, plan.peak_host_bytes);
  cost.peak_device_bytes = std::max(cost.peak_device_bytes, plan.peak_device_bytes);
}

// Times one batch through one layer and scales it to the whole run.
CostEstimate estimate_cost(Transformer& model, const SplitCorpus& split, const RunPlan& plan,
                           const CalibrateOptions& options, const MemoryLimits& limits) {
  const TokenChunks& corpus = split.fit;
  const torch::InferenceMode inference;
  CostEstimate cost;
  cost.peak_host_bytes = plan.peak_host_bytes;
  cost.peak_device_bytes = plan.peak_device_bytes;
  cost.num_shards = plan.shards.size();
  cost.weights_resident = plan.weights_resident;
  const Batch& batch = plan.batches.front();
  const torch::Tensor hidden = model.embed(batch_ids(corpus, batch).to(model.compute().device));
  const auto weights = model.load_layer(0);
  const std::vector<LayerGeometry> layers = geometries(options, model.config());
  MomentCollector collector(layers.front(), model.compute().device);
  model.forward_layer(0, *weights, hidden, &collector);  // warms up
  collector.result();
  const auto start = Clock::now();
  model.forward_layer(0, *weights, hidden, &collector);
  collector.result();  // waits for the device
  const double per_token = seconds_since(start) / static_cast<double>(batch.tokens());
  const int passes = wants_energy(options) ? 2 : 1;
  cost.seconds =
      per_token * static_cast<double>(corpus.record.tokens) * model.config().num_layers * passes;
  if (options.search.any()) {
    std::vector<LayerStatistics> statistics = {collector.result()};
    statistics[0].o_proj_metric = model.o_proj_metric(0);
    if (wants_energy(options)) {
      EnergyPass energy(statistics, model.compute().device);
      model.forward_layer(0, *weights, hidden, energy.observer(0));
      energy.store(statistics);
    }
    cost.search_seconds = estimate_search_seconds(model, split, options, statistics);
    add_search_memory(model, split, options, limits, cost);
  }
  cost.bundle_bytes = estimated_bundle_bytes(layers, options);
  cost.checkpoint_bytes = estimated_statistics_bytes(layers) +
                          snapshot_bytes(model.config(), plan.snapshot_tokens.size());
  return cost;
}

}  // namespace

CalibrateResult calibrate(const CalibrateOptions& requested, Progress& progress) {
  if (!requested.dry_run) check_output_path(requested);
  const Checkpoint checkpoint = open_checkpoint(requested.model, requested.rope_scaling);
  const ComputeOptions compute = choose_compute(requested.device, requested.dtype);
  CalibrateOptions options = resolve(requested, checkpoint.config, compute);
  const MemoryLimits limits = memory_limits(options, compute);
  Transformer model(checkpoint, compute);

  CalibrateResult result;
  result.device = describe(compute);
  const std::string warning =
      window_warning(options.quantizer, checkpoint.config.rope.max_positions);
  if (!warning.empty()) result.warnings.push_back(warning);
  const TokenChunks corpus =
      make_chunks(options, options.chunk_len, checkpoint, model,
                  compute.device.is_cuda() ? limits.device_bytes : limits.host_bytes, progress);
  result.corpus = corpus.record;
  if (!options.tokens_out.empty()) {
    const std::string uneven = write_chunks_npy(corpus, options.tokens_out);
    if (!uneven.empty()) result.warnings.push_back(uneven);
  }
  const SplitCorpus split = split_corpus(corpus, options, result.warnings);
  result.held_back_tokens = split.held_back.record.tokens;
  std::vector<Batch> batches = plan_batches(split.fit.chunks, options.batch_tokens);
  std::vector<int64_t> snapshot_tokens = plan_snapshots(batches);
  const RunPlan plan = plan_run(model, std::move(batches), limits, options.checkpoint_every,
                                std::move(snapshot_tokens));
  if (options.dry_run) {
    result.dry_run = true;
    result.cost = estimate_cost(model, split, plan, options, limits);
    return result;
  }

  Bundle bundle = describe_run(options, checkpoint, corpus.record);
  bundle.fingerprint = fingerprint_of(corpus.chunks);
  if (options.search.any()) {
    bundle.search = describe_search(options, split.num_search, split.num_confirm,
                                    split.held_back.record.tokens);
  }
  bundle.run_key = run_key(options, bundle, compute);
  if (options.resume && is_finished_output(options, bundle)) {
    result.already_done = true;
    return result;
  }

  const auto collect_start = Clock::now();
  CheckpointFile saved(options, bundle);
  auto [statistics, snapshots] = collect(model, split.fit, plan, options, saved, progress);
  result.collect_seconds = seconds_since(collect_start);
  const auto judge_start = Clock::now();
  bundle.convergence =
      judge_convergence(snapshots, statistics, plan, options.fit, checkpoint.config.rope, progress);
  snapshots.clear();
  result.convergence_seconds = seconds_since(judge_start);
  // Hadamard's and the identity are the same for every text.
  const bool follows_text = options.search.kind || options.fit.kind == TransformKind::kOscar ||
                            options.fit.kind == TransformKind::kBalanced;
  if (follows_text && needs_more_text(bundle.convergence)) {
    const auto lines = convergence_lines(bundle.convergence);
    result.warnings.push_back(lines.at(0) + " " + lines.at(1));
  }

  const int64_t layers = checkpoint.config.num_layers;
  const auto fit_start = Clock::now();
  std::vector<LayerDecision> decisions;
  if (options.search.any()) {
    SearchPass search(model, statistics, search_settings(options), split.num_search,
                      split.num_confirm);
    progress.begin("searching", split.held_back.record.tokens * layers, "token-layers");
    run_pass(model, split.held_back, plan_search(model, split, options, limits), {}, search, saved,
             kSearchAgain, progress);
    progress.end();
    decisions = search.take_decisions();
    result.search_seconds = seconds_since(fit_start);
  } else if (!options.statistics_only) {
    progress.begin("fitting", layers, "layers");
    for (const LayerStatistics& layer : statistics) {
      decisions.push_back(fit_without_search(layer, options.fit, checkpoint.config.rope));
      progress.advance(1);
    }
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
  write_bundle(bundle, options.output, options.force || options.resume);
  saved.remove();
  result.bundle = std::move(bundle);
  return result;
}

}  // namespace oscar
