// What a run will take, from a layer of each kind.
#include "oscar/calibrate/cost_estimate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>

#include "oscar/base/process.h"
#include "oscar/calibrate/assemble.h"
#include "oscar/calibrate/collector.h"
#include "oscar/calibrate/search/pass.h"
#include "oscar/calibrate/search/search.h"
#include "oscar/fit/convergence.h"
#include "oscar/model/layer_major.h"
#include "oscar/text/ngram_fingerprint.h"

namespace oscar {

// Alternating runs with and without the collectors.

namespace {

class NothingObserved final : public LayerVisitor {
 public:
  AttentionObserver* observer(int) override { return nullptr; }
  void layer_done(const RunPosition&) override {}
};

double seconds_of_pass(Transformer& model, const TokenSequences& corpus, const RunPlan& plan,
                       LayerVisitor& visitor) {
  SilentProgress progress;
  const auto finish = [&] {
    if (model.compute().device.is_cuda()) torch::cuda::synchronize(model.compute().device.index());
  };
  finish();
  const auto start = std::chrono::steady_clock::now();
  run_layer_major(model, corpus, plan, {}, visitor, progress);
  finish();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

CollectionTiming time_collection(Transformer& model, const TokenSequences& corpus,
                                 int64_t batch_tokens, int repeats) {
  RunPlan plan;
  plan.batches = plan_batches(corpus.sequences, batch_tokens);
  plan.waves = {{0, plan.batches.size(), corpus.record.tokens}};
  plan.memory.weights_resident = true;
  std::vector<LayerGeometry> layers;
  for (int layer = 0; layer < model.config().num_layers; ++layer) {
    layers.push_back(model.config().geometry(layer, /*recent_tokens=*/0));
  }
  CollectionTiming timing;
  timing.tokens = corpus.record.tokens;
  for (int repeat = -1; repeat < repeats; ++repeat) {
    NothingObserved nothing;
    MomentPass moments(model, layers, [](const MomentPass&, const RunPosition&) {});
    const double forward = seconds_of_pass(model, corpus, plan, nothing);
    const double collect = seconds_of_pass(model, corpus, plan, moments);
    if (repeat < 0) continue;  // warm-up
    timing.forward_seconds.push_back(forward);
    timing.collect_seconds.push_back(collect);
  }
  return timing;
}

// One layer timed in parts, each scaled by what it grows with.

namespace {

using Clock = std::chrono::steady_clock;

template <typename Work>
double seconds_of(const Work& work) {
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::optional<AttendedCollector> attended_collector(const Transformer& model,
                                                    const LayerGeometry& geometry,
                                                    const CalibrateOptions& options) {
  std::optional<AttendedCollector> collector;
  if (const auto view = attended_view(options); view && geometry.quantized) {
    collector.emplace(geometry, model.config().rope, *view, model.compute().device);
  }
  return collector;
}

// One layer with one batch, and what has been collected of it.
class Probe {
 public:
  Probe(Transformer& model, int layer, const LayerGeometry& geometry, torch::Tensor hidden,
        const CalibrateOptions& options)
      : weights(model.load_layer(layer)), model_(model), layer_(layer), hidden_(std::move(hidden)) {
    if (!geometry.fitted()) return;
    collector_.emplace(geometry, model.compute().device,
                       attended_collector(model, geometry, options));
  }

  // Waits for the device.
  void forward() {
    const torch::Tensor out =
        model_.forward_layer(layer_, *weights, hidden_, collector_ ? &*collector_ : nullptr);
    out.select(-1, 0).isfinite().all().item<bool>();
  }

  // Of a layer that is not local.
  LayerStatistics sums() const { return collector_->result(); }

  const std::shared_ptr<const LayerWeights> weights;

 private:
  Transformer& model_;
  int layer_;
  torch::Tensor hidden_;
  std::optional<MomentCollector> collector_;
};

// Seconds of `work` for each of `layers` layers, as many at a time as there are cores.
double seconds_of_layers(double layers, const std::function<void()>& work) {
  const int64_t together = std::clamp<int64_t>(static_cast<int64_t>(layers), 1, parallel_cores());
  const double once = seconds_of([&] { parallel_for(together, [&](int64_t) { work(); }); });
  return once * layers / static_cast<double>(together);
}

// Seconds of judging the text of `layers` layers. `parts`: states of one's running sums as a run
// would copy them.
double time_convergence(const std::vector<LayerStatistics>& parts, const LayerStatistics& total,
                        const CollectionPlan& plan, int64_t tokens, const CalibrateOptions& options,
                        const Rope& rope, double layers) {
  const LayerGeometry& geometry = total.geometry;
  std::vector<int64_t> counts = plan.snapshot_tokens;
  counts.push_back(tokens);
  if (!geometry.quantized || parts.empty()) return 0;
  if (!convergence_problem(counts, std::max(geometry.head_dim_k, geometry.head_dim_v)).empty()) {
    return 0;
  }
  std::vector<const LayerStatistics*> pointers;
  for (const LayerStatistics& part : parts) pointers.push_back(&part);
  return seconds_of_layers(layers, [&] { layer_convergence(pointers, total, options.fit, rope); });
}

torch::Tensor embed_held_back(Transformer& model, const SplitCorpus& split, size_t sequence) {
  const auto length = static_cast<int64_t>(split.held_back.sequences[sequence].size());
  const torch::Tensor ids = batch_ids(split.held_back, {static_cast<int64_t>(sequence), 1, length});
  return model.embed(ids.to(model.compute().device));
}

// Seconds of a search over the first `count` sequences of each half, fits included, of as many
// layers as `statistics` has, all of them like the one of `weights`, `together` at a time.
double time_search(Transformer& model, const SplitCorpus& split, const CalibrateOptions& options,
                   const std::vector<LayerStatistics>& statistics, const LayerWeights& weights,
                   size_t count, int together) {
  const size_t searching = std::min(count, split.num_search);
  const size_t confirming = std::min(count, split.num_confirm);
  return seconds_of([&] {
    SearchPass pass(model, statistics, search_settings(options), searching, confirming, together);
    for (size_t layer = 0; layer < statistics.size(); ++layer) {
      for (size_t i = 0; i < searching + confirming; ++i) {
        const size_t sequence = i < searching ? i : split.num_search + i - searching;
        model.forward_layer(statistics.front().geometry.layer_id, weights,
                            embed_held_back(model, split, sequence),
                            pass.observer(static_cast<int>(layer)));
      }
      pass.layer_done({});
    }
    pass.take_decisions();
  });
}

// Of `layers` searched ones on a GPU, which is busy without a pause once the first of them have
// their fits: several at a time and twice as many are searched on the whole text.
double search_seconds_gpu(Transformer& model, const SplitCorpus& split,
                          const CalibrateOptions& options, const LayerStatistics& layer,
                          const LayerWeights& weights, int together, double layers) {
  const size_t all = std::max(split.num_search, split.num_confirm);
  const auto of_layers = [&](int count, size_t sequences) {
    return time_search(model, split, options,
                       std::vector<LayerStatistics>(static_cast<size_t>(count), layer), weights,
                       sequences, together);
  };
  of_layers(1, 1);  // warms up
  const double first = of_layers(together, all);
  const double further = std::max(0.0, of_layers(2 * together, all) - first) / together;
  return first + further * (layers - together);
}

// On the CPU, one layer at a time. Fits of a layer do not depend on the held-back sequences.
double search_seconds_cpu(Transformer& model, const SplitCorpus& split,
                          const CalibrateOptions& options, const LayerStatistics& layer,
                          const LayerWeights& weights, double layers) {
  const double one = time_search(model, split, options, {layer}, weights, 1, 1);
  const double fits =
      seconds_of([&] { fit_for_search(layer, options.fit, options.search, model.config().rope); });
  const double pairs = static_cast<double>(split.num_search + split.num_confirm) / 2;
  return (one + std::max(0.0, one - fits) * (pairs - 1)) * layers;
}

// Of all `layers` searched ones, of which a process searches `part` and passes all.
double search_seconds(Transformer& model, const SplitCorpus& split, const CalibrateOptions& options,
                      const LayerStatistics& layer, const LayerWeights& weights, int together,
                      double layers, double part) {
  const double whole =
      model.compute().device.is_cuda()
          ? search_seconds_gpu(model, split, options, layer, weights, together, layers)
          : search_seconds_cpu(model, split, options, layer, weights, layers);
  if (part == 1) return whole;
  const torch::Tensor hidden = embed_held_back(model, split, 0);
  const double passing =
      layers * static_cast<double>(split.num_search + split.num_confirm) * seconds_of([&] {
        const auto out = model.forward_layer(layer.geometry.layer_id, weights, hidden, nullptr);
        out.select(-1, 0).isfinite().all().item<bool>();
      });
  return passing + part * std::max(0.0, whole - passing);
}

// Sums in a checkpoint; `within_block`: the blocks before have sums of their own then.
int64_t estimated_sums_bytes(const std::vector<LayerGeometry>& layers, const ModelConfig& config,
                             const CollectionPlan& plan, bool within_block) {
  return estimated_statistics_bytes(layers, plan.attended) + gate_sums_bytes(config) +
         snapshot_bytes(config, plan.snapshot_tokens.size() + (within_block ? 1 : 0),
                        plan.attended);
}

// Of a checkpoint between two layers, which holds the hidden states of a wave too.
int64_t estimated_stop_bytes(const std::vector<LayerGeometry>& layers, const ModelConfig& config,
                             const CollectionPlan& plan) {
  const int64_t tokens = std::ranges::max(plan.waves, {}, &Wave::tokens).tokens;
  return estimated_sums_bytes(layers, config, plan, plan.block_tokens.size() > 1) +
         tokens * plan.hidden_bytes_per_token;
}

// Of the run's own checkpoints: resident weights pass once a wave, and they are taken between
// waves.
int64_t estimated_checkpoint_bytes(const std::vector<LayerGeometry>& layers,
                                   const ModelConfig& config, const CollectionPlan& plan) {
  if (!plan.memory.weights_resident) return estimated_stop_bytes(layers, config, plan);
  const bool within_block = std::ranges::any_of(plan.waves, [&](const Wave& wave) {
    const int64_t end = tokens_of(plan, 0, wave.first_batch + wave.num_batches);
    const int64_t block = block_start(plan, end);
    return 0 < block && block < end;
  });
  return estimated_sums_bytes(layers, config, plan, within_block);
}

// The bytes that a run writes.
void add_file_sizes(const std::vector<LayerGeometry>& layers, const ModelConfig& config,
                    const SplitCorpus& split, const CollectionPlan& plan,
                    const CalibrateOptions& options, CostEstimate& cost) {
  const int64_t hashes =
      std::min(split.fit.record.tokens + split.held_back.record.tokens, kFingerprintCapacity);
  cost.bundle_bytes =
      estimated_bundle_bytes(layers, options) + hashes * static_cast<int64_t>(sizeof(int64_t));
  cost.checkpoint_bytes = estimated_checkpoint_bytes(layers, config, plan);
  cost.stop_bytes = estimated_stop_bytes(layers, config, plan);
}

// Of collecting, and on the CPU of the end, when the bundle is there twice.
MemoryPeak collecting_peak(const Transformer& model, const CollectionPlan& plan,
                           int64_t bundle_bytes) {
  const torch::Device device = model.compute().device;
  if (device.is_cuda()) return plan.peak;
  return larger_peak(plan.peak, memory_peak(writing_needs(model, bundle_bytes), {}, 0, device),
                     device);
}

// The first layer that something is collected of, and what has been timed of it.
struct TimedLayer {
  std::optional<Probe> probe;
  double load = 0, forward = 0;        // seconds of its weights, and of one batch
  double copy = 0, metric = 0;         // of copying its sums, and of the output projection's metric
  std::vector<LayerStatistics> parts;  // its sums on the way
  LayerStatistics total;
};

TimedLayer time_layer(Transformer& model, const LayerGeometry& geometry,
                      const torch::Tensor& hidden, const CalibrateOptions& options,
                      size_t num_parts) {
  TimedLayer timed;
  timed.load =
      seconds_of([&] { timed.probe.emplace(model, geometry.layer_id, geometry, hidden, options); });
  timed.parts.resize(num_parts);
  for (LayerStatistics& part : timed.parts) {
    timed.probe->forward();
    part = timed.probe->sums();
  }
  if (timed.parts.empty()) timed.probe->forward();  // warms up
  timed.forward = seconds_of([&] { timed.probe->forward(); });
  timed.copy = seconds_of([&] { timed.total = timed.probe->sums(); });
  timed.metric = seconds_of([&] {
    timed.total.o_proj_metric = model.o_proj_metric(geometry.layer_id);
    std::vector<LayerStatistics> one = {std::move(timed.total)};
    add_gates_to_metrics(model, one);
    timed.total = std::move(one.front());
  });
  return timed;
}

// Whether sums of what is held back are added, in the search's own pass.
bool adds_held_back(const CalibrateOptions& options) {
  return options.search.any() && !wants_energy(options);
}

// Seconds of collecting from the first batch on, `hidden`: of each LayerSpec one layer is timed.
double collecting_seconds(Transformer& model, const SplitCorpus& split, const CollectionPlan& plan,
                          const CalibrateOptions& options, const Ranks& ranks,
                          const torch::Tensor& hidden, const TimedLayer& first) {
  const ModelConfig& config = model.config();
  const std::vector<LayerGeometry> layers = geometries(options, config);
  const torch::Device device = model.compute().device;
  const bool resident = plan.memory.weights_resident;
  // The second pass, over energies, is the first process' alone.
  const double passes =
      longest_part(ranks, device, plan.block_tokens.size()) + (wants_energy(options) ? 1 : 0);
  const int64_t held_back = adds_held_back(options) ? split.held_back.record.tokens : 0;
  const auto fitted = static_cast<double>(split.fit.record.tokens);
  const double tokens = passes * fitted + static_cast<double>(held_back);
  // Weights that stream pass once for each block that a process has.
  const size_t waves =
      ranks.several() ? std::max(plan.waves.size(), plan.block_tokens.size()) : plan.waves.size();
  const double loads = resident ? std::ceil(passes) : passes * static_cast<double>(waves);
  const double first_share = static_cast<double>(plan.waves.front().tokens) / fitted;
  const auto copies = static_cast<double>(first.parts.size() + 1);
  double seconds = config.num_fitted_layers() * (first.metric + copies * first.copy);
  for (const std::vector<int>& same : config.layers_by_spec()) {
    double load = first.load, forward = first.forward;
    if (const int layer = same.front(); layer != first.total.geometry.layer_id) {
      std::optional<Probe> other;
      load = seconds_of([&] {
        other.emplace(model, layer, layers[static_cast<size_t>(layer)], hidden, options);
      });
      other->forward();  // warms up
      forward = seconds_of([&] { other->forward(); });
    }
    const double computing = forward * tokens / static_cast<double>(plan.batches.front().tokens());
    // On a GPU a layer is read while those before compute: weights that stay, in the first wave.
    const double beside = !device.is_cuda() ? 0 : resident ? first_share : 1;
    seconds += static_cast<double>(same.size()) *
               (computing + std::max(0.0, loads * load - beside * computing));
  }
  return seconds;
}

// The sums of the layer with its energies, as the second pass adds them.
LayerStatistics with_energy(Transformer& model, const TimedLayer& first,
                            const torch::Tensor& hidden) {
  std::vector<LayerStatistics> layer = {first.total};
  EnergyPass energy(layer, model.compute().device);
  model.forward_layer(first.total.geometry.layer_id, *first.probe->weights, hidden,
                      energy.observer(0));
  energy.store(layer);
  return std::move(layer.front());
}

}  // namespace

CostEstimate estimate_cost(Transformer& model, const SplitCorpus& split, const CollectionPlan& plan,
                           const RunPlan* search_plan, const CalibrateOptions& options,
                           const Ranks& ranks) {
  const torch::InferenceMode inference;
  const ModelConfig& config = model.config();
  const torch::Device device = model.compute().device;
  const std::vector<LayerGeometry> layers = geometries(options, config);
  const auto num_searched =
      static_cast<size_t>(std::ranges::count_if(layers, &LayerGeometry::quantized));
  const auto num_quantized = static_cast<double>(num_searched);
  CostEstimate cost{.num_waves = plan.waves.size(),
                    .weights_resident = plan.memory.weights_resident};
  add_file_sizes(layers, config, split, plan, options, cost);
  cost.peak = collecting_peak(model, plan, cost.bundle_bytes);
  if (search_plan) cost.peak = larger_peak(cost.peak, search_plan->peak, device);

  const torch::Tensor hidden = model.embed(batch_ids(split.fit, plan.batches.front()).to(device));
  const LayerGeometry& probed = *std::ranges::find_if(layers, &LayerGeometry::fitted);
  TimedLayer first = time_layer(model, probed, hidden, options, plan.snapshot_tokens.size());
  cost.seconds = collecting_seconds(model, split, plan, options, ranks, hidden, first);
  if (!device.is_cuda() || !search_plan) {  // otherwise beside the search, which takes longer
    cost.convergence_seconds =
        time_convergence(first.parts, first.total, plan, split.fit.record.tokens, options,
                         config.rope, num_quantized);
  }
  if (wants_energy(options)) first.total = with_energy(model, first, hidden);
  if (search_plan && probed.quantized) {
    const int together = std::min(search_plan->memory.side_by_side, static_cast<int>(num_searched));
    cost.search_seconds =
        search_seconds(model, split, options, first.total, *first.probe->weights, together,
                       num_quantized, longest_part(ranks, device, num_searched));
  }
  if (adds_held_back(options) || (!search_plan && !options.statistics_only)) {
    cost.fit_seconds = seconds_of_layers(
        num_quantized, [&] { fit_without_search(first.total, options.fit, config.rope); });
  }
  return cost;
}

}  // namespace oscar
