// The split by options, and the plan of what is held back.
#include "oscar/calibrate/split_corpus.h"

#include <algorithm>
#include <utility>

#include "oscar/search/held_back.h"

namespace oscar {

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

HeldBackSize held_back_size(const SplitCorpus& split) {
  HeldBackSize size{.tokens = split.held_back.record.tokens,
                    .search_chunks = static_cast<int64_t>(split.num_search)};
  for (const auto& chunk : split.held_back.chunks) {
    size.longest_chunk = std::max(size.longest_chunk, static_cast<int64_t>(chunk.size()));
  }
  return size;
}

int layers_searched_together(const Transformer& model, const SplitCorpus& split,
                             const RunPlan& plan, const CalibrateOptions& options,
                             const MemoryLimits& limits) {
  const torch::Device device = model.compute().device;
  if (!device.is_cuda()) return 1;
  const int64_t each = search_bytes(model, split, options, plan.workspace_bytes);
  const int64_t room = limits.device_bytes - plan.peak_device_bytes;
  return static_cast<int>(std::clamp<int64_t>(room / each, 1, kMostLayersTogether));
}

int64_t search_bytes(const Transformer& model, const SplitCorpus& split,
                     const CalibrateOptions& options, int64_t workspace_bytes) {
  const torch::Device device = model.compute().device;
  const HeldBackSize size = held_back_size(split);
  const int64_t bytes =
      search_memory_bytes(model.config(), size, options.fit, options.search, device);
  if (device.is_cuda()) return bytes;
  // A layer is searched when no batch runs.
  return std::max(bytes - workspace_bytes, held_back_bytes(model.config(), size));
}

RunPlan plan_search(const Transformer& model, const SplitCorpus& split,
                    const CalibrateOptions& options, const MemoryLimits& limits) {
  const std::vector<Batch> batches = plan_batches(split.held_back.chunks, options.batch_tokens);
  PassNeeds needs;
  // Complete sums are saved before the search, but beside a GPU while it begins.
  needs.saved_beside = model.compute().device.is_cuda();
  needs.attended = attended_view(options).has_value();
  needs.search_bytes =
      search_bytes(model, split, options, collecting_bytes(model, batches, needs.attended));
  RunPlan plan = plan_run(model, batches, limits, std::move(needs));
  // The sums that fits start from, beside those that go on.
  plan.peak_host_bytes += snapshot_bytes(model.config(), 1, plan.attended);
  return in_one_wave(std::move(plan), model.compute().device);
}

SearchSettings search_settings(const CalibrateOptions& options) {
  return {.fit = options.fit,
          .search = options.search,
          .quantizer = options.quantizer,
          .seed = options.seed};
}

std::vector<LayerGeometry> geometries(const CalibrateOptions& options, const ModelConfig& config) {
  std::vector<LayerGeometry> layers;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    layers.push_back(config.geometry(layer, options.quantizer.recent_tokens));
  }
  return layers;
}

std::optional<CacheView> attended_view(const CalibrateOptions& options) {
  const SearchOptions& search = options.search;
  const bool wanted =
      options.fit.row_weights == RowWeights::kAttention || search.row_weights || search.key_centres;
  if (!wanted) return {};
  return cache_view(options.quantizer);
}

bool wants_energy(const CalibrateOptions& options) {
  return options.fit.objective_v == ValueObjective::kEnergy;
}

}  // namespace oscar
