// From fits to one choice: the stages on the search half, then confirmation on the other.
#include "oscar/search/layer_search.h"

#include <cmath>

#include "oscar/base/interrupt.h"
#include "oscar/fit/portable.h"
#include "oscar/search/search_confirm.h"
#include "oscar/search/search_memory.h"

namespace oscar {
namespace {

// Queries of a chunk where stages are confirmed; the final pair is confirmed on all of them. Those
// while searching: search_memory.h.
constexpr int64_t kConfirmQuick = 256, kConfirmFull = 1024;

LayerTransforms assemble_layer(const Candidate& c, const SideVariant& key,
                               const SideVariant& value) {
  LayerTransforms layer;
  layer.geometry = c.fits.front().fit.geometry;
  layer.warnings = c.fits.front().fit.warnings;
  layer.key = compose_heads(key, Side::kKey);
  layer.value = compose_heads(value, Side::kValue);
  layer.key.clip_losses = c.key.clip_losses;
  layer.value.clip_losses = c.value.clip_losses;
  return layer;
}

LossSettings loss_settings(const LayerSearchTask& task) {
  const LayerGeometry& g = task.statistics.geometry;
  return {.quantizer = task.quantizer,
          .layer = g.layer_id,
          .sliding_window = g.sliding_window,
          .sm_scale = 1.0 / std::sqrt(static_cast<double>(g.head_dim_k)),
          .output_metric = task.output_metric,
          .codecs = std::make_shared<VariantCodecs>(task.quantizer, g.layer_id,
                                                    task.output_metric.device())};
}

// The searched recipe, then the portable one of each granularity.
std::vector<Candidate> candidates_of(const LayerSearchTask& task, LayerFits fits) {
  std::vector<Candidate> candidates(3);
  candidates[0].fixed = task.fixed;
  candidates[0].search = task.search;
  candidates[0].fits = std::move(fits.searched);
  for (size_t i = 1; i < candidates.size(); ++i) {
    const bool shared = i == 1;
    Candidate& c = candidates[i];
    c.fixed = portable_options(task.fixed, shared ? Granularity::kShared : Granularity::kPerHead);
    c.search = {.clip = true, .full = task.search.full};
    c.pooled = true;
    c.fits = std::move(shared ? fits.portable_shared : fits.portable_per_head);
  }
  return candidates;
}

}  // namespace

LayerChoice fit_without_search(const LayerStatistics& statistics, const FitOptions& fixed,
                               const Rope& rope) {
  LayerChoice choice;
  choice.layer = fit_layer(statistics, fixed, rope);
  choice.portable = {fit_portable(statistics, fixed, Granularity::kShared, rope),
                     fit_portable(statistics, fixed, Granularity::kPerHead, rope)};
  return choice;
}

LayerFits fit_for_search(const LayerStatistics& statistics, const FitOptions& fixed,
                         const SearchOptions& search, const Rope& rope) {
  std::vector<FitRequest> wanted = fit_requests(fixed, search);
  const auto searched = static_cast<std::ptrdiff_t>(wanted.size());
  for (const auto granularity : {Granularity::kShared, Granularity::kPerHead}) {
    for (const auto kind : {TransformKind::kOscar, TransformKind::kHadamard}) {
      wanted.push_back({portable_options(fixed, granularity)});
      wanted.back().options.kind = kind;
    }
  }
  std::vector<FitVariant> all = fit_all(statistics, wanted, rope);
  const auto part = [&](std::ptrdiff_t begin, std::ptrdiff_t end) {
    return std::vector<FitVariant>(std::make_move_iterator(all.begin() + begin),
                                   std::make_move_iterator(all.begin() + end));
  };
  return {part(0, searched), part(searched, searched + 2), part(searched + 2, searched + 4)};
}

LayerChoice search_layer(const LayerSearchTask& task, const HeldBackLayer& held_back) {
  return search_layer(task, fit_for_search(task.statistics, task.fixed, task.search, task.rope),
                      held_back);
}

LayerChoice search_layer(const LayerSearchTask& task, LayerFits fits,
                         const HeldBackLayer& held_back) {
  const LossSettings settings = loss_settings(task);
  std::vector<Candidate> candidates = candidates_of(task, std::move(fits));
  int64_t searched_queries = 0;
  {
    const auto half = HeldBackHalf::sampled(
        held_back.search, settings, task.search.full ? kSearchFull : kSearchQuick, task.seed, true);
    searched_queries = half.num_queries();
    for (Candidate& c : candidates) run_stages(c, half);
  }

  stop_if_requested();
  const auto sample =
      HeldBackHalf::sampled(held_back.confirm, settings,
                            task.search.full ? kConfirmFull : kConfirmQuick, ~task.seed, false);
  const Candidate& best = candidates[0];
  ConfirmedSides confirmed = confirm_sides(best, sample);

  // Both sides INT2: the default pair beside the searched one, the main fit's on every query.
  const auto all = HeldBackHalf::all_queries(held_back.confirm, settings);
  std::vector<LayerTransforms> layers;
  for (const Candidate& c : candidates) {
    stop_if_requested();
    const bool main = &c == &best;
    const HeldBackHalf& half = main ? all : sample;
    const FinalPair settled = settle(c, main ? confirmed.key.variant : c.key.current(),
                                     main ? confirmed.value.variant : c.value.current(), half);
    layers.push_back(assemble_layer(c, settled.key, settled.value));
    if (!main) layers.back().warnings.clear();  // those of the layer itself
    layers.back().predicted_output_nmse = settled.nmse;
    layers.back().search = {
        {"search_queries", searched_queries},      {"stage_queries", sample.num_queries()},
        {"confirm_queries", half.num_queries()},   {"key", {{"stages", c.key.compared}}},
        {"value", {{"stages", c.value.compared}}}, {"pair", settled.heads}};
  }
  layers[0].search["key"]["heads"] = std::move(confirmed.key.heads);
  layers[0].search["value"]["heads"] = std::move(confirmed.value.heads);
  return {std::move(layers[0]), {std::move(layers[1]), std::move(layers[2])}};
}

}  // namespace oscar
