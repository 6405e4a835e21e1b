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

double seconds_of_pass(Transformer& model, const TokenChunks& corpus, const RunPlan& plan,
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

CollectionTiming time_collection(Transformer& model, const TokenChunks& corpus,
                                 int64_t batch_tokens, int repeats) {
  RunPlan plan;
  plan.batches = plan_batches(corpus.chunks, batch_tokens);
  plan.waves = {{0, plan.batches.size(), corpus.record.tokens}};
  plan.weights_resident = true;
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
                        const RunPlan& plan, int64_t tokens, const CalibrateOptions& options,
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

torch::Tensor embed_held_back(Transformer& model, const SplitCorpus& split, size_t chunk) {
  const auto length = static_cast<int64_t>(split.held_back.chunks[chunk].size());
  const torch::Tensor ids = batch_ids(split.held_back, {static_cast<int64_t>(chunk), 1, length});
  return model.embed(ids.to(model.compute().device));
}

// Seconds of a search over the first `count` chunks of each half, fits included, of as many layers
// as `statistics` has, all of them like the one of `weights`, `together` at a time.
double time_search(Transformer& model, const SplitCorpus& split, const CalibrateOptions& options,
                   const std::vector<LayerStatistics>& statistics, const LayerWeights& weights,
                   size_t count, int together) {
  const size_t searching = std::min(count, split.num_search);
  const size_t confirming = std::min(count, split.num_confirm);
  return seconds_of([&] {
    SearchPass pass(model, statistics, search_settings(options), searching, confirming, together);
    for (size_t layer = 0; layer < statistics.size(); ++layer) {
      for (size_t i = 0; i < searching + confirming; ++i) {
        const size_t chunk = i < searching ? i : split.num_search + i - searching;
        model.forward_layer(statistics.front().geometry.layer_id, weights,
                            embed_held_back(model, split, chunk),
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
  const auto of_layers = [&](int count, size_t chunks) {
    return time_search(model, split, options,
                       std::vector<LayerStatistics>(static_cast<size_t>(count), layer), weights,
                       chunks, together);
  };
  of_layers(1, 1);  // warms up
  const double first = of_layers(together, all);
  const double further = std::max(0.0, of_layers(2 * together, all) - first) / together;
  return first + further * (layers - together);
}

// On the CPU, one layer at a time. Fits of a layer do not depend on the held-back chunks.
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

// The peaks of the search's own pass: `plan`, over the held-back chunks, and what is held of them
// where so many layers are searched together.
void add_search_memory(const Transformer& model, const SplitCorpus& split,
                       const CalibrateOptions& options, RunPlan plan, int together,
                       CostEstimate& cost) {
  const torch::Device device = model.compute().device;
  const int64_t each = search_bytes(model, split, options, plan.workspace_bytes);
  (device.is_cuda() ? plan.peak_device_bytes : plan.peak_host_bytes) += together * each;
  cost.peak_host_bytes = std::max(cost.peak_host_bytes, plan.peak_host_bytes);
  cost.peak_device_bytes = std::max(cost.peak_device_bytes, plan.peak_device_bytes);
}

// Sums in a checkpoint; `within_block`: the blocks before have sums of their own then.
int64_t estimated_sums_bytes(const std::vector<LayerGeometry>& layers, const ModelConfig& config,
                             const RunPlan& plan, bool within_block) {
  return estimated_statistics_bytes(layers, plan.attended) +
         snapshot_bytes(config, plan.snapshot_tokens.size() + (within_block ? 1 : 0),
                        plan.attended);
}

// Of a checkpoint between two layers, which holds the hidden states of a wave too.
int64_t estimated_stop_bytes(const std::vector<LayerGeometry>& layers, const ModelConfig& config,
                             const RunPlan& plan) {
  const int64_t tokens = std::ranges::max(plan.waves, {}, &Wave::tokens).tokens;
  return estimated_sums_bytes(layers, config, plan, plan.block_tokens.size() > 1) +
         tokens * plan.hidden_bytes_per_token;
}

// Of the run's own checkpoints: resident weights pass once a wave, and they are taken between
// waves.
int64_t estimated_checkpoint_bytes(const std::vector<LayerGeometry>& layers,
                                   const ModelConfig& config, const RunPlan& plan) {
  if (!plan.weights_resident) return estimated_stop_bytes(layers, config, plan);
  const bool within_block = std::ranges::any_of(plan.waves, [&](const Wave& wave) {
    const int64_t end = tokens_of(plan, 0, wave.first_batch + wave.num_batches);
    const int64_t block = block_start(plan, end);
    return 0 < block && block < end;
  });
  return estimated_sums_bytes(layers, config, plan, within_block);
}

}  // namespace

CostEstimate estimate_cost(Transformer& model, const SplitCorpus& split, const RunPlan& plan,
                           const CalibrateOptions& options, const MemoryLimits& limits,
                           const Ranks& ranks) {
  const torch::InferenceMode inference;
  const ModelConfig& config = model.config();
  const std::vector<LayerGeometry> layers = geometries(options, config);
  const auto num_searched =
      static_cast<size_t>(std::ranges::count_if(layers, &LayerGeometry::quantized));
  const auto num_quantized = static_cast<double>(num_searched);
  const torch::Device device = model.compute().device;
  const bool on_gpu = device.is_cuda();
  CostEstimate cost;
  cost.num_waves = plan.waves.size();
  cost.weights_resident = plan.weights_resident;

  const Batch& batch = plan.batches.front();
  const torch::Tensor hidden = model.embed(batch_ids(split.fit, batch).to(model.compute().device));
  // The first layer that something is collected of.
  const LayerGeometry& probed = *std::ranges::find_if(layers, &LayerGeometry::fitted);
  std::optional<Probe> first;
  const double first_load =
      seconds_of([&] { first.emplace(model, probed.layer_id, probed, hidden, options); });
  const Probe& probe = *first;
  std::vector<LayerStatistics> parts(plan.snapshot_tokens.size());
  for (LayerStatistics& part : parts) {
    first->forward();
    part = first->sums();
  }
  if (parts.empty()) first->forward();  // warms up
  const double first_forward = seconds_of([&] { first->forward(); });
  LayerStatistics total;
  const double copy = seconds_of([&] { total = first->sums(); });
  const double metric =
      seconds_of([&] { total.o_proj_metric = model.o_proj_metric(probed.layer_id); });
  // The sums of what is held back are added in the search's own pass.
  const bool added = options.search.any() && !wants_energy(options);
  // The second pass, over energies, is the first process' alone.
  const double passes =
      longest_part(ranks, device, plan.block_tokens.size()) + (wants_energy(options) ? 1 : 0);
  const double tokens = passes * static_cast<double>(split.fit.record.tokens) +
                        static_cast<double>(added ? split.held_back.record.tokens : 0);
  // Weights that stream pass once for each block that a process has.
  const size_t waves =
      ranks.several() ? std::max(cost.num_waves, plan.block_tokens.size()) : cost.num_waves;
  const double loads =
      plan.weights_resident ? std::ceil(passes) : passes * static_cast<double>(waves);
  const double first_share =
      static_cast<double>(plan.waves.front().tokens) / static_cast<double>(split.fit.record.tokens);
  const auto copies = static_cast<double>(parts.size() + 1);
  cost.seconds = config.num_fitted_layers() * (metric + copies * copy);
  for (const std::vector<int>& same : config.layers_by_spec()) {
    double load = first_load, forward = first_forward;
    if (const int layer = same.front(); layer != probed.layer_id) {
      std::optional<Probe> other;
      load = seconds_of([&] {
        other.emplace(model, layer, layers[static_cast<size_t>(layer)], hidden, options);
      });
      other->forward();  // warms up
      forward = seconds_of([&] { other->forward(); });
    }
    const double computing = forward * tokens / static_cast<double>(batch.tokens());
    const double loading = loads * load;
    // On a GPU a layer is read while those before compute: weights that stay, in the first wave.
    const double beside = !on_gpu ? 0 : plan.weights_resident ? first_share : 1;
    cost.seconds += static_cast<double>(same.size()) *
                    (computing + std::max(0.0, loading - beside * computing));
  }
  if (!on_gpu || !options.search.any()) {  // otherwise beside the search, which takes longer
    cost.convergence_seconds = time_convergence(parts, total, plan, split.fit.record.tokens,
                                                options, config.rope, num_quantized);
  }
  if (wants_energy(options)) {
    std::vector<LayerStatistics> first_layer = {total};
    EnergyPass energy(first_layer, model.compute().device);
    model.forward_layer(probed.layer_id, *probe.weights, hidden, energy.observer(0));
    energy.store(first_layer);
    total = std::move(first_layer.front());
  }
  const int64_t hashes =
      std::min(split.fit.record.tokens + split.held_back.record.tokens, kFingerprintCapacity);
  cost.bundle_bytes =
      estimated_bundle_bytes(layers, options) + hashes * static_cast<int64_t>(sizeof(int64_t));
  cost.checkpoint_bytes = estimated_checkpoint_bytes(layers, config, plan);
  cost.stop_bytes = estimated_stop_bytes(layers, config, plan);
  // At the end the bundle is there twice, as it is and as the bytes of its file.
  const int64_t written = forward_bytes(model, 0) + 2 * cost.bundle_bytes;
  cost.peak_host_bytes = on_gpu ? plan.peak_host_bytes : std::max(plan.peak_host_bytes, written);
  cost.peak_device_bytes = plan.peak_device_bytes;
  if (options.search.any()) {
    const RunPlan search_plan = plan_search(model, split, options, limits);
    const int together = layers_searched_together(model, split, search_plan, options, limits);
    if (probed.quantized) {
      cost.search_seconds =
          search_seconds(model, split, options, total, *probe.weights,
                         std::min(together, static_cast<int>(num_searched)), num_quantized,
                         longest_part(ranks, device, num_searched));
    }
    add_search_memory(model, split, options, search_plan, together, cost);
  }
  if (added || (!options.search.any() && !options.statistics_only)) {
    cost.fit_seconds = seconds_of_layers(
        num_quantized, [&] { fit_without_search(total, options.fit, config.rope); });
  }
  return cost;
}

}  // namespace oscar
