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
#include "oscar/bundle/checkpoint.h"
#include "oscar/calibrate/assemble.h"
#include "oscar/calibrate/corpus_source.h"
#include "oscar/calibrate/held_back.h"
#include "oscar/calibrate/resume.h"
#include "oscar/calibrate/search_pass.h"
#include "oscar/calibrate/statistics_pass.h"
#include "oscar/fit/presets.h"

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
        "stopped on request. What was collected is in {};\n  repeat the command with --resume to "
        "continue{}",
        saved.path().string(), done_again));
  }
}

bool has_energy(const std::vector<LayerStatistics>& statistics) {
  return std::none_of(statistics.begin(), statistics.end(),
                      [](const LayerStatistics& s) { return s.v_energy_moment.empty(); });
}

// The statistics that the fit needs, from the checkpoint on when there is one. They are in the
// checkpoint once complete, unless all that follows is a short fit.
std::vector<LayerStatistics> collect(Transformer& model, const TokenChunks& corpus,
                                     const RunPlan& plan, const CalibrateOptions& options,
                                     CheckpointFile& saved, Progress& progress) {
  MomentPass moments(model, geometries(options, model.config()),
                     [&](const MomentPass& sums, const RunPosition& next) {
                       if (saved.due(next, plan, interrupt_requested())) {
                         saved.save(sums.result(), next);
                       }
                     });
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
    moments.restore(resumed->statistics);
    start = std::move(resumed->position);
    energy_saved = start.batch == plan.batches.size() && has_energy(resumed->statistics);
    if (!energy_saved) resumed.reset();  // the sums are in the collectors
  }
  const int64_t token_layers = corpus.record.tokens * model.config().num_layers;
  progress.begin("collecting statistics", token_layers, "token-layers");
  run_pass(model, corpus, plan, std::move(start), moments, saved, kCollecting, progress);
  progress.end();
  std::vector<LayerStatistics> statistics = moments.result();
  check_counts(statistics, corpus.record.tokens);

  const RunPosition complete{plan.batches.size(), 0, {}};
  if (!wants_energy(options)) {
    if (options.search.any()) saved.save(statistics, complete);
    return statistics;
  }
  if (energy_saved) return std::move(resumed->statistics);
  saved.save(statistics, complete);
  EnergyPass energy(statistics, model.compute().device);
  progress.begin("second pass: value energy", token_layers, "token-layers");
  run_pass(model, corpus, plan, {}, energy, saved, kEnergyAgain, progress);
  progress.end();
  energy.store(statistics);
  saved.save(statistics, complete);
  return statistics;
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
  RunPlan plan =
      plan_run(model, plan_batches(split.held_back.chunks, options.batch_tokens), limits, 1 << 20);
  plan.shards = {{0, plan.batches.size(), split.held_back.record.tokens}};
  return plan;
}

// Times the smallest possible search of layer 0, a chunk in each half, and scales it.
double estimate_search_seconds(Transformer& model, const SplitCorpus& split,
                               const CalibrateOptions& options,
                               const std::vector<LayerStatistics>& first_layer) {
  SearchPass pass(model, first_layer, options, 1, 1);
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

// Times one batch through one layer and scales it to the whole run.
CostEstimate estimate_cost(Transformer& model, const SplitCorpus& split, const RunPlan& plan,
                           const CalibrateOptions& options) {
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
  }
  cost.bundle_bytes = estimated_bundle_bytes(layers, options);
  cost.checkpoint_bytes = estimated_statistics_bytes(layers);
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
  const TokenChunks corpus =
      make_chunks(options, options.chunk_len, checkpoint, model,
                  compute.device.is_cuda() ? limits.device_bytes : limits.host_bytes, progress);
  result.corpus = corpus.record;
  if (!options.tokens_out.empty()) {
    const std::string warning = write_chunks_npy(corpus, options.tokens_out);
    if (!warning.empty()) result.warnings.push_back(warning);
  }
  const SplitCorpus split = split_corpus(corpus, options, result.warnings);
  result.held_back_tokens = split.held_back.record.tokens;
  const RunPlan plan = plan_run(model, plan_batches(split.fit.chunks, options.batch_tokens), limits,
                                options.checkpoint_every);
  if (options.dry_run) {
    result.dry_run = true;
    result.cost = estimate_cost(model, split, plan, options);
    return result;
  }

  Bundle bundle = describe_run(options, checkpoint, corpus.record);
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
  std::vector<LayerStatistics> statistics =
      collect(model, split.fit, plan, options, saved, progress);
  result.collect_seconds = seconds_since(collect_start);

  const int64_t layers = checkpoint.config.num_layers;
  const auto fit_start = Clock::now();
  std::vector<LayerChoice> choices;
  if (options.search.any()) {
    SearchPass search(model, statistics, options, split.num_search, split.num_confirm);
    progress.begin("searching", split.held_back.record.tokens * layers, "token-layers");
    run_pass(model, split.held_back, plan_search(model, split, options, limits), {}, search, saved,
             kSearchAgain, progress);
    progress.end();
    choices = search.take_choices();
    result.search_seconds = seconds_since(fit_start);
  } else if (!options.statistics_only) {
    progress.begin("fitting", layers, "layers");
    for (const LayerStatistics& layer : statistics) {
      choices.push_back(fit_without_search(layer, options.fit, checkpoint.config.rope));
      progress.advance(1);
    }
    progress.end();
    result.fit_seconds = seconds_since(fit_start);
  }
  for (LayerChoice& choice : choices) {
    const auto& warnings = choice.layer.warnings;
    result.warnings.insert(result.warnings.end(), warnings.begin(), warnings.end());
    bundle.layers.push_back(std::move(choice.layer));
    bundle.portable.push_back(std::move(choice.portable));
  }
  if (options.keep_statistics || options.statistics_only) bundle.statistics = std::move(statistics);
  write_bundle(bundle, options.output, options.force || options.resume);
  saved.remove();
  result.bundle = std::move(bundle);
  return result;
}

}  // namespace oscar
