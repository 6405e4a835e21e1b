// A calibration whose model another engine ran: its sums and its held-back rows, as a folder.
#include "oscar/calibrate/recording.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <optional>
#include <utility>

#include "oscar/base/json.h"
#include "oscar/base/process.h"
#include "oscar/bundle/merge.h"
#include "oscar/calibrate/assemble.h"
#include "oscar/calibrate/search/candidates.h"
#include "oscar/calibrate/search/pass.h"
#include "oscar/calibrate/search/search.h"
#include "oscar/io/safetensors.h"
#include "oscar/model/attention.h"
#include "oscar/model/layer_weights.h"
#include "oscar/model/memory.h"

namespace oscar {

// The folder: its index and its two files of sums.

namespace {

namespace fs = std::filesystem;

constexpr const char* kIndex = "recording.json";
constexpr const char* kFormat = "oscar-recording";
constexpr int kVersion = 1;

fs::path layer_file(const fs::path& folder, int layer) {
  return folder / fmt::format("layer-{:03}.safetensors", layer);
}

fs::path rows_file(const fs::path& folder, int layer, size_t sequence) {
  return folder / fmt::format("layer-{:03}-sequence-{}.safetensors", layer, sequence);
}

[[noreturn]] void refuse_index(const fs::path& index, const std::string& key,
                               const std::string& expected) {
  throw Error({.what = "malformed index of a recorded run",
               .where = fmt::format("{}: {}", index.string(), key),
               .expected = expected});
}

RecordedLayer read_layer(const Json& json, const fs::path& index) {
  RecordedLayer layer;
  const auto member = [&](const char* name, const Json& missing) -> Json {
    return json.is_object() && json.contains(name) ? json.at(name) : missing;
  };
  const Json scale = member("sm_scale", 1.0), gated = member("gated", false),
             reason = member("not_searched", "");
  if (!json.is_object() || !scale.is_number() || !(scale.get<double>() > 0) ||
      !gated.is_boolean() || !reason.is_string()) {
    refuse_index(index, "layers", "objects with sm_scale above 0, gated and not_searched");
  }
  layer.sm_scale = scale.get<double>();
  layer.gated = gated.get<bool>();
  layer.not_searched = reason.get<std::string>();
  return layer;
}

}  // namespace

bool is_recording(const fs::path& folder) {
  std::error_code status;
  return fs::is_regular_file(folder / kIndex, status);
}

Recording read_recording(const fs::path& folder) {
  const fs::path index = folder / kIndex;
  const Json json = read_json_file(index);
  if (!json.is_object() || json.value("format", Json()) != kFormat ||
      json.value("version", Json()) != kVersion) {
    refuse_index(index, "format", fmt::format("{}, version {}", kFormat, kVersion));
  }
  Recording recording{
      .folder = folder, .all = {}, .fitted = {}, .sequence_lengths = {}, .layers = {}};
  const Json lengths = json.value("sequence_lengths", Json()),
             layers = json.value("layers", Json());
  if (!lengths.is_array() || !layers.is_array()) {
    refuse_index(index, "sequence_lengths, layers", "two lists");
  }
  for (const Json& length : lengths) {
    if (!length.is_number_unsigned() || length.get<uint64_t>() > kMaxLength) {
      refuse_index(index, "sequence_lengths", "whole numbers of tokens");
    }
    recording.sequence_lengths.push_back(length.get<int64_t>());
  }
  for (const Json& layer : layers) recording.layers.push_back(read_layer(layer, index));
  const fs::path all = folder / "statistics.h5", fitted = folder / "fitted.h5";
  recording.all = read_bundle(all);
  recording.fitted = read_bundle(fitted);
  require_statistics(recording.all, all.string());
  require_statistics(recording.fitted, fitted.string());
  require_same_model(recording.all, recording.fitted, all.string(), fitted.string());
  if (recording.layers.size() != recording.all.statistics.size()) {
    refuse_index(index, "layers", fmt::format("{} of them", recording.all.statistics.size()));
  }
  return recording;
}

// The rows of one layer.

namespace {

// What is held back, in the order in which a calibration observes it.
struct HeldBackPlaces {
  std::vector<size_t> sequences;  // search half first
  std::vector<int64_t> lengths;   // of each, in tokens
  std::vector<int64_t> offsets;   // where each is placed
  size_t num_search = 0;

  int64_t tokens() const {
    int64_t sum = 0;
    for (const int64_t length : lengths) sum += length;
    return sum;
  }
};

HeldBackPlaces places_of(const Recording& recording, int64_t position_span, uint64_t seed) {
  const HeldBack split = hold_back(recording.sequence_lengths, recording.all.quantizer);
  if (!split.reason.empty()) {
    throw Error({.what = "nothing is held back",
                 .where = recording.folder.string(),
                 .found = split.reason,
                 .hint = "fit the sums alone: oscar-bundle fit " +
                         (recording.folder / "statistics.h5").string() + " -o OUT"});
  }
  HeldBackPlaces places{.sequences = split.search,
                        .lengths = {},
                        .offsets = placement_offsets(position_span, split.search.size(), seed),
                        .num_search = split.search.size()};
  places.sequences.insert(places.sequences.end(), split.confirm.begin(), split.confirm.end());
  const auto of_confirm = placement_offsets(position_span, split.confirm.size(), ~seed);
  places.offsets.insert(places.offsets.end(), of_confirm.begin(), of_confirm.end());
  for (const size_t i : places.sequences) places.lengths.push_back(recording.sequence_lengths[i]);
  return places;
}

void require_queries(const HeldBackPlaces& places, const CacheFormat& quantizer) {
  const int64_t least = fewest_tokens(quantizer);
  const int64_t shortest = *std::ranges::min_element(places.lengths);
  if (shortest >= least) return;
  throw Error({.what = "a held-back sequence is too short for these windows",
               .where = "--sink, --recent",
               .expected = fmt::format("at least {} tokens", least),
               .found = std::to_string(shortest),
               .hint = "smaller windows, longer sequences, or --search off"});
}

torch::Tensor take(FloatTensors& tensors, const char* name, const std::vector<int64_t>& shape,
                   const fs::path& file) {
  const auto found = tensors.find(name);
  if (found == tensors.end() || found->second.shape != shape) {
    throw Error({.what = fmt::format("tensor {} is missing, or of another shape", name),
                 .where = file.string(),
                 .expected = fmt::format("[{}]", fmt::join(shape, ", ")),
                 .found = found == tensors.end()
                              ? "none"
                              : fmt::format("[{}]", fmt::join(found->second.shape, ", "))});
  }
  torch::Tensor tensor =
      torch::from_blob(found->second.values.data(), shape, torch::kFloat32).clone();
  tensors.erase(found);
  return tensor;
}

// Rows of one sequence, turned to its place.
HeldSequence read_rows(const Recording& recording, const LayerGeometry& g, const Rope& rope,
                       size_t sequence, int64_t tokens, int64_t offset, torch::Device device) {
  const fs::path file = rows_file(recording.folder, g.layer_id, sequence);
  FloatTensors tensors = read_safetensors(file);
  const auto rows = [&](const char* name, int heads, int d) {
    return take(tensors, name, {heads, tokens, d}, file).to(device);
  };
  const auto place = torch::tensor({offset});
  HeldSequence held{.q = move_positions(rows("q", g.num_qo_heads, g.head_dim_k), rope, place),
                    .k = move_positions(rows("k", g.num_kv_heads, g.head_dim_k), rope, place),
                    .v = rows("v", g.num_kv_heads, g.head_dim_v),
                    .first_position = offset};
  if (recording.layers[static_cast<size_t>(g.layer_id)].gated) {
    held.gate = rows("gate", g.num_qo_heads, g.head_dim_v);
  }
  if (!tensors.empty()) {
    throw Error({.what = fmt::format("tensor {} is not expected", tensors.begin()->first),
                 .where = file.string()});
  }
  return held;
}

HeldBackLayer read_held_back(const Recording& recording, const LayerGeometry& geometry,
                             const Rope& rope, const HeldBackPlaces& places, torch::Device device) {
  HeldBackLayer held;
  for (size_t i = 0; i < places.sequences.size(); ++i) {
    stop_if_requested();
    (i < places.num_search ? held.search : held.confirm)
        .push_back(read_rows(recording, geometry, rope, places.sequences[i], places.lengths[i],
                             places.offsets[i], device));
  }
  return held;
}

// Throws when a layer's search does not fit.
void require_memory(const Recording& recording, const HeldBackPlaces& places, const FitOptions& fit,
                    const RecordedOptions& options, torch::Device device) {
  const BundleModel& model = recording.all.model;
  ModelConfig shape;
  shape.num_qo_heads = model.num_qo_heads;
  shape.num_kv_heads = model.num_kv_heads;
  shape.head_dim = std::max(model.head_dim_k, model.head_dim_v);
  MemoryNeeds needs{
      .held = search_needs(shape,
                           {.tokens = places.tokens(),
                            .search_sequences = static_cast<int64_t>(places.num_search),
                            .longest_sequence = *std::ranges::max_element(places.lengths)},
                           fit, options.search, device),
      .least = "the search of one layer",
      .hint = "raise the limit, or leave the search out: --search off"};
  const auto gated = [](const RecordedLayer& layer) { return layer.gated; };
  if (std::ranges::any_of(recording.layers, gated)) {
    needs.held.push_back({.name = "gates of the rows held back",
                          .moment = Moment::kBetween,
                          .compute_bytes = 2 * places.tokens() * int64_t{shape.num_qo_heads} *
                                           shape.head_dim * int64_t{sizeof(float)}});
  }
  plan_memory(needs, memory_limits(device, options.host_memory, options.gpu_memory), device);
}

}  // namespace

// Layer by layer: the search, then the last fit.

namespace {

// What the search of all layers shares.
struct Searches {
  const Recording& recording;
  const RecordedOptions& options;
  const HeldBackPlaces& places;
  torch::Device device;
  int searched = 0;  // layers

  LayerDecision search(const LayerStatistics& all, const FitOptions& fit, const Rope& rope,
                       const CacheFormat& quantizer);
};

LayerDecision Searches::search(const LayerStatistics& all, const FitOptions& fit, const Rope& rope,
                               const CacheFormat& quantizer) {
  const LayerGeometry& g = all.geometry;
  const auto index = static_cast<size_t>(g.layer_id);
  LayerStatistics fitted = recording.fitted.statistics[index];
  fitted.geometry = g;
  if (fitted.count_kv + places.tokens() != all.count_kv) {
    throw Error({.what = "sums and held-back rows are of different runs",
                 .where = fmt::format("{}: layer {}", recording.folder.string(), g.layer_id),
                 .expected = fmt::format("{} tokens in fitted.h5", all.count_kv - places.tokens()),
                 .found = std::to_string(fitted.count_kv)});
  }
  const Rope layer_rope = g.turned ? rope : Rope{};
  const fs::path file = layer_file(recording.folder, g.layer_id);
  FloatTensors tensors = read_safetensors(file);
  const torch::Tensor metric =
      take(tensors, "output_metric", {g.num_qo_heads, g.head_dim_v, g.head_dim_v}, file).to(device);
  ++searched;
  return search_layer({.statistics = fitted,
                       .fixed = fit,
                       .search = options.search,
                       .rope = layer_rope,
                       .quantizer = quantizer,
                       .sm_scale = recording.layers[index].sm_scale,
                       .seed = recording.all.fit_seed,
                       .output_metric = metric},
                      read_held_back(recording, g, layer_rope, places, device));
}

}  // namespace

RecordedResult calibrate_recorded(Recording recording, const RecordedOptions& options,
                                  Progress& progress) {
  const torch::InferenceMode inference;
  const ComputeOptions compute = choose_compute(options.device, "auto");
  RecordedResult result{
      .bundle = {}, .device = describe(compute), .held_back_tokens = 0, .warnings = {}};
  const std::string name = (recording.folder / "statistics.h5").string();
  std::vector<LayerStatistics> sums = std::move(recording.all.statistics);
  Bundle all = recording.all;
  all.statistics = std::move(sums);
  std::optional<HeldBackPlaces> places;
  std::optional<Searches> searches;
  progress.begin("searching", static_cast<int64_t>(all.statistics.size()), "layers");
  result.bundle = refit_bundle(
      std::move(all), options.refit, name,
      [&](const LayerStatistics& layer, const FitOptions& fit, const Rope& rope,
          const CacheFormat& quantizer) -> RefittedLayer {
        if (options.search.any() && !places) {
          places = places_of(recording, fit.position_span, recording.all.fit_seed);
          require_queries(*places, quantizer);
          require_memory(recording, *places, fit, options, compute.device);
          searches.emplace(Searches{recording, options, *places, compute.device});
        }
        const LayerGeometry& g = layer.geometry;
        const std::string& reason = recording.layers[static_cast<size_t>(g.layer_id)].not_searched;
        LayerDecision decision;
        if (searches && g.quantized && reason.empty()) {
          decision = searches->search(layer, fit, rope, quantizer);
        }
        decision = fit_again(std::move(decision), layer, fit, rope);
        if (searches && g.quantized && !reason.empty()) {
          decision.main.warnings.push_back(fmt::format(
              "layer {}: nothing was searched, because {}; choices are those of the preset",
              g.layer_id, reason));
        }
        progress.advance(1);
        return {std::move(decision.main), std::move(decision.portable)};
      });
  progress.end();
  for (const LayerTransforms& layer : result.bundle.layers) {
    result.warnings.insert(result.warnings.end(), layer.warnings.begin(), layer.warnings.end());
  }
  if (!searches || searches->searched == 0) return result;
  result.held_back_tokens = places->tokens();
  result.bundle.search =
      describe_search(options.search, recording.all.fit_seed, places->num_search,
                      places->sequences.size() - places->num_search, result.held_back_tokens);
  return result;
}

}  // namespace oscar
