// What was chosen to a bundle, with the verdict on its text.
#include "oscar/calibrate/assemble.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "oscar/base/process.h"
#include "oscar/base/sha256.h"
#include "oscar/bundle/match.h"
#include "oscar/bundle/weight_samples.h"
#include "oscar/calibrate/corpus.h"
#include "oscar/fit/convergence.h"
#include "oscar/fit/fit.h"

namespace oscar {

// Layers side by side.

Json judge_convergence(const SumSnapshots& snapshots,
                       const std::vector<LayerStatistics>& statistics, const CollectionPlan& plan,
                       const FitOptions& options, const Rope& rope, bool may_stop,
                       Progress& progress) {
  const LayerStatistics& any = first_fitted(statistics, "the model");
  std::vector<int64_t> parts = plan.snapshot_tokens;
  parts.push_back(any.count_kv);
  const std::string problem =
      convergence_problem(parts, std::max(any.geometry.head_dim_k, any.geometry.head_dim_v));
  std::vector<LayerConvergence> layers;
  if (!problem.empty()) return convergence_record(layers, any.count_kv, problem);
  std::map<int, std::vector<const LayerStatistics*>> by_layer;
  for (const auto& copy : snapshots) by_layer[copy->geometry.layer_id].push_back(copy.get());
  std::vector<const LayerStatistics*> judged;
  for (const LayerStatistics& total : statistics) {
    if (total.geometry.quantized) judged.push_back(&total);
  }
  layers.resize(judged.size());
  progress.begin("judging the text", static_cast<int64_t>(judged.size()), "layers");
  std::mutex advancing;
  parallel_for(static_cast<int64_t>(judged.size()), [&](int64_t index) {
    if (may_stop) stop_if_requested();
    const auto layer = static_cast<size_t>(index);
    const auto& copies = by_layer.at(judged[layer]->geometry.layer_id);
    layers[layer] = layer_convergence(copies, *judged[layer], options, rope);
    const std::lock_guard<std::mutex> lock(advancing);
    progress.advance(1);
  });
  progress.end();
  return convergence_record(layers, any.count_kv, "no layer is quantized");
}

// Provenance of a run.

Bundle describe_run(const CalibrateOptions& options, const Checkpoint& checkpoint,
                    const CorpusRecord& corpus) {
  Bundle bundle;
  bundle.statistics_only = options.statistics_only;
  bundle.preset = options.preset;
  bundle.method = method_name(options.fit.kind);
  bundle.objective_v = objective_name(options.fit.objective_v);
  bundle.composition = composition_name(options.fit.kind);
  bundle.granularity = granularity_name(options.fit.granularity);
  bundle.row_weights = row_weights_name(options.fit.row_weights);
  bundle.position_span = options.fit.position_span;
  bundle.fit_seed = options.seed;
  bundle.model = describe_model(checkpoint, options.hash_weights);
  bundle.weight_samples = sample_weights(checkpoint.config, *checkpoint.weights);
  bundle.corpus = corpus;
  bundle.quantizer = options.quantizer;
  return bundle;
}

Json describe_search(const SearchOptions& s, uint64_t seed, size_t search_sequences,
                     size_t confirm_sequences, int64_t held_back_tokens) {
  Json searched = Json::array();
  for (const auto& [on, name] : {std::pair{s.kind, s.orthogonal ? "orthogonal method" : "method"},
                                 {s.center, "center"},
                                 {s.granularity, "granularity"},
                                 {s.row_weights, "row weights"},
                                 {s.key_centers, "key centers"},
                                 {s.clip, "clip"},
                                 {s.rounding, "rounding"},
                                 {s.scale_correction, "scale correction"}}) {
    if (on) searched.push_back(name);
  }
  return {{"searched", std::move(searched)},
          {"effort", "quick"},  // the only one since 0.2
          {"search_chunks", search_sequences},
          {"confirm_chunks", confirm_sequences},
          {"held_back_tokens", held_back_tokens},
          {"seed", seed},
          {"fallback", s.fallback}};
}

std::string run_key(const CalibrateOptions& options, const Bundle& bundle,
                    const ComputeOptions& compute) {
  Json fit = {{"method", bundle.method},
              {"objective_v", bundle.objective_v},
              {"granularity", bundle.granularity},
              {"row_weights", bundle.row_weights},
              {"center", options.fit.center},
              {"key_centers", key_centers_name(options.fit.key_centers)},
              {"rounding", rounding_name(options.fit.rounding)},
              {"scale_correction", scale_correction_name(options.fit.scale_correction)},
              {"clip", {options.fit.clip_k, options.fit.clip_v}},
              {"position_span", options.fit.position_span},
              {"search", bundle.search},
              {"clip_scope", static_cast<int>(options.search.clip_scope)},
              {"statistics_only", options.statistics_only},
              {"statistics", options.keep_statistics}};
  const CacheFormat& quantizer = options.quantizer;
  const Json identity = {
      {"weights", bundle.model.weights_fingerprint},
      {"config", bundle.model.config_sha256},
      {"rope", bundle.model.rope},
      {"tokens", bundle.corpus.tokens_sha256},
      {"chunk_len", options.sequence_length},
      {"batch_tokens", options.batch_tokens},
      {"device", compute.device.is_cuda() ? "cuda" : "cpu"},
      {"dtype", compute.dtype == torch::kBFloat16 ? "bf16" : "fp32"},
      {"fit", std::move(fit)},
      {"quantizer",
       {quantizer.quant_group_size, quantizer.sink_tokens, quantizer.recent_tokens,
        quantizer.demote_block, codec_word(quantizer.metadata_dtype),
        codec_word(quantizer.rules.clip_span), codec_word(quantizer.rules.zero),
        codec_word(quantizer.rules.ties), codec_word(quantizer.rules.metadata_rounding)}},
  };
  return sha256_of(identity.dump());
}

// What HDF5 adds to a dataset.
constexpr int64_t kDatasetBytes = 450;

int64_t estimated_statistics_bytes(const std::vector<LayerGeometry>& layers, bool attended) {
  constexpr int64_t kDatasets = 12, kAttendedDatasets = 10;
  int64_t bytes = kDatasets * kDatasetBytes * static_cast<int64_t>(layers.size());
  for (const LayerGeometry& layer : layers) {
    if (!layer.fitted()) continue;
    const int64_t k = layer.head_dim_k, v = layer.head_dim_v;
    bytes += 8 * layer.num_kv_heads * (2 * k * k + 3 * v * v + 2 * k + 2 * v);
    if (!attended || !layer.quantized) continue;
    bytes += kAttendedDatasets * kDatasetBytes +
             8 * layer.num_kv_heads * (2 * k * k + v * v + 2 * k + v + 4);
  }
  return bytes;
}

// Before compression, but for numbers that are bf16's and halves that are zero.
int64_t estimated_bundle_bytes(const std::vector<LayerGeometry>& layers,
                               const CalibrateOptions& options) {
  const FitOptions& fit = options.fit;
  const SearchOptions& search = options.search;  // what it may choose counts as chosen
  // Balanced matrices are bf16 numbers; the search leaves most heads balanced.
  const int64_t rotation_bytes = fit.kind == TransformKind::kBalanced ? 2 + 4 : 4;  // with inverse
  const bool metric = fit.scale_correction == ScaleCorrection::kMetric || search.scale_correction;
  const bool shaped = fit.rounding == Rounding::kShaped || search.rounding;
  int64_t bytes = 0;
  for (const LayerGeometry& layer : layers) {  // bf16 numbers
    if (!layer.fitted()) continue;
    bytes += kDatasetBytes + 2 * int64_t{layer.num_kv_heads} * kSampledMatrices * kWeightSamples;
  }
  if (!options.statistics_only) {
    for (const LayerGeometry& layer : layers) {
      if (!layer.fitted()) continue;
      const int64_t k = layer.head_dim_k, v = layer.head_dim_v, heads = layer.num_kv_heads;
      constexpr int64_t kDatasets = 51;        // 21 of the layer, 15 of each portable variant
      constexpr int64_t kSearchRecord = 1600;  // JSON of a head, both sides
      constexpr int64_t kClipLosses = 12;      // datasets: two a side of each variant
      if (search.clip) bytes += kClipLosses * kDatasetBytes;
      if (search.any()) bytes += kSearchRecord * heads;
      bytes += kDatasets * kDatasetBytes + rotation_bytes * heads * (k * k + v * v);
      if (metric) bytes += 4 * heads * (k * k + v * v);
      if (shaped) bytes += 2 * heads * (k * (k + 1) + v * (v + 1));  // triangular factors
      bytes += 4 * (heads + 1) * (k * k + v * v);  // portable: per head, and one for all
    }
  }
  if (options.keep_statistics || options.statistics_only) {
    bytes += estimated_statistics_bytes(layers, attended_view(options).has_value());
    for (const LayerGeometry& layer : layers) {
      if (fit.objective_v != ValueObjective::kEnergy) break;
      if (!layer.fitted()) continue;
      bytes += 8 * int64_t{layer.num_kv_heads} * layer.head_dim_v * layer.head_dim_v;
    }
  }
  return bytes;
}

}  // namespace oscar
