// From fits to one decision: the stages on the search half, then confirmation on the other.
#include "oscar/search/layer_search.h"

#include <algorithm>

#include "oscar/base/interrupt.h"
#include "oscar/fit/fitted_layers.h"
#include "oscar/fit/portable.h"
#include "oscar/search/confirm.h"
#include "oscar/search/memory.h"

namespace oscar {
namespace {

// Queries of a chunk where stages are confirmed; the final pair is confirmed on all of them. Those
// while searching: memory.h.
constexpr int64_t kConfirmQuick = 256, kConfirmFull = 1024;

VariantChoice choice_of(const VariantSearch& v, const Candidate& key, const Candidate& value) {
  const auto of_side = [&](const Candidate& candidate, Side side) {
    std::vector<HeadChoice> heads;
    for (const FittedHead& head : candidate) {
      heads.push_back({fit_of(head, side, v.fits, v.fallback).request, head.recipe});
    }
    return heads;
  };
  return {of_side(key, Side::kKey), of_side(value, Side::kValue)};
}

LayerTransforms assemble_layer(const VariantSearch& v, const Candidate& key,
                               const Candidate& value) {
  LayerTransforms layer;
  layer.geometry = v.fits.front().transforms.geometry;
  layer.warnings = v.fits.front().transforms.warnings;
  layer.key = compose_heads(key, Side::kKey);
  layer.value = compose_heads(value, Side::kValue);
  layer.key.clip_losses = v.key.clip_losses;
  layer.value.clip_losses = v.value.clip_losses;
  return layer;
}

LossSettings loss_settings(const LayerSearchTask& task) {
  const LayerGeometry& g = task.statistics.geometry;
  return {.quantizer = task.quantizer,
          .layer = g.layer_id,
          .sliding_window = g.sliding_window,
          .sm_scale = task.sm_scale,
          .output_metric = task.output_metric,
          .rope = task.rope,
          .codecs = std::make_shared<CandidateCodecs>(task.quantizer, g.layer_id, task.rope,
                                                      task.output_metric.device())};
}

// The main variant, then the portable one of each granularity.
std::vector<VariantSearch> variants_of(const LayerSearchTask& task, VariantFits fits) {
  std::vector<VariantSearch> variants(3);
  variants[0].fixed = task.fixed;
  variants[0].search = task.search;
  variants[0].fits = std::move(fits.main);
  for (size_t i = 1; i < variants.size(); ++i) {
    const bool shared = i == 1;
    VariantSearch& v = variants[i];
    v.fixed = portable_options(task.fixed, shared ? Granularity::kShared : Granularity::kPerHead);
    v.search = {.clip = true, .full = task.search.full};
    v.pooled = true;
    v.fits = std::move(shared ? fits.portable_shared : fits.portable_per_head);
  }
  if (task.search.fallback) {
    const auto hadamard = std::ranges::find_if(variants[2].fits, [](const SearchFit& fit) {
      return fit.request.options.kind == TransformKind::kHadamard;
    });
    variants[0].fallback = &*hadamard;
  }
  return variants;
}

}  // namespace

LayerDecision fit_without_search(const LayerStatistics& statistics, const FitOptions& fixed,
                                 const Rope& rope) {
  if (!statistics.geometry.fitted()) {
    const LayerTransforms none = without_transforms(statistics.geometry);
    return {none, {none, none}};
  }
  LayerDecision decision;
  decision.main = fit_layer(statistics, fixed, rope);
  decision.portable = {fit_portable(statistics, fixed, Granularity::kShared, rope),
                       fit_portable(statistics, fixed, Granularity::kPerHead, rope)};
  return decision;
}

LayerDecision fit_again(LayerDecision decision, const LayerStatistics& statistics,
                        const FitOptions& fixed, const Rope& rope) {
  if (decision.choices.empty()) return fit_without_search(statistics, fixed, rope);
  std::vector<FitRequest> wanted;
  const auto index_of = [&](const FitRequest& fit) {
    const auto index = static_cast<size_t>(std::ranges::find(wanted, fit) - wanted.begin());
    if (index == wanted.size()) wanted.push_back(fit);
    return index;
  };
  for (const VariantChoice& choice : decision.choices) {
    for (const auto* heads : {&choice.key, &choice.value}) {
      for (const HeadChoice& head : *heads) index_of(head.fit);
    }
  }
  const std::vector<LayerTransforms> fits = fit_layer_variants(statistics, wanted, rope);
  const auto make_again = [&](const std::vector<HeadChoice>& heads, Side side,
                              SideTransform& transform) {
    Candidate candidate;
    for (const HeadChoice& head : heads) {
      candidate.push_back({.fit = &side_of(fits[index_of(head.fit)], side),
                           .head = static_cast<int>(candidate.size()),
                           .recipe = head.recipe});
    }
    auto losses = std::move(transform.clip_losses);
    transform = compose_heads(candidate, side);
    transform.clip_losses = std::move(losses);
  };
  LayerTransforms* const layers[] = {&decision.main, &decision.portable.shared,
                                     &decision.portable.per_head};
  for (size_t i = 0; i < decision.choices.size(); ++i) {
    make_again(decision.choices[i].key, Side::kKey, layers[i]->key);
    make_again(decision.choices[i].value, Side::kValue, layers[i]->value);
  }
  decision.main.warnings = fits.front().warnings;
  return decision;
}

VariantFits fit_for_search(const LayerStatistics& statistics, const FitOptions& fixed,
                           const SearchOptions& search, const Rope& rope) {
  std::vector<FitRequest> wanted = fit_requests(fixed, search);
  const size_t of_main = wanted.size();
  for (const auto granularity : {Granularity::kShared, Granularity::kPerHead}) {
    for (const auto kind : {TransformKind::kOscar, TransformKind::kHadamard}) {
      wanted.push_back({portable_options(fixed, granularity)});
      wanted.back().options.kind = kind;
    }
  }
  std::vector<LayerTransforms> transforms = fit_layer_variants(statistics, wanted, rope);
  const auto part = [&](size_t begin, size_t end) {
    std::vector<SearchFit> fits;
    for (size_t i = begin; i < end; ++i) fits.push_back({wanted[i], std::move(transforms[i])});
    return fits;
  };
  return {part(0, of_main), part(of_main, of_main + 2), part(of_main + 2, of_main + 4)};
}

LayerDecision search_layer(const LayerSearchTask& task, const HeldBackLayer& held_back) {
  return search_layer(task, fit_for_search(task.statistics, task.fixed, task.search, task.rope),
                      held_back);
}

LayerDecision search_layer(const LayerSearchTask& task, VariantFits fits,
                           const HeldBackLayer& held_back) {
  const LossSettings settings = loss_settings(task);
  std::vector<VariantSearch> variants = variants_of(task, std::move(fits));
  int64_t searched_queries = 0;
  {
    const auto half = HeldBackHalf::sampled(
        held_back.search, settings, task.search.full ? kSearchFull : kSearchQuick, task.seed, true);
    searched_queries = half.num_queries();
    for (VariantSearch& v : variants) run_stages(v, half);
  }

  stop_if_requested();
  const auto sample =
      HeldBackHalf::sampled(held_back.confirm, settings,
                            task.search.full ? kConfirmFull : kConfirmQuick, ~task.seed, false);
  ConfirmedSides confirmed = confirm_sides(variants[0], sample);

  // Both sides INT2: the default pair beside the picked one, those of the main variant on every
  // query.
  const auto all = HeldBackHalf::all_queries(held_back.confirm, settings);
  std::vector<LayerTransforms> layers;
  std::vector<VariantChoice> choices;
  for (const VariantSearch& v : variants) {
    stop_if_requested();
    const bool main = &v == &variants[0];
    const HeldBackHalf& half = main ? all : sample;
    const SettledPair settled = settle(v, main ? confirmed.key.candidate : v.key.current(),
                                       main ? confirmed.value.candidate : v.value.current(), half);
    layers.push_back(assemble_layer(v, settled.key, settled.value));
    choices.push_back(choice_of(v, settled.key, settled.value));
    if (!main) layers.back().warnings.clear();  // those of the layer itself
    layers.back().predicted_output_nmse = settled.nmse;
    layers.back().search = {
        {"search_queries", searched_queries},      {"stage_queries", sample.num_queries()},
        {"confirm_queries", half.num_queries()},   {"key", {{"stages", v.key.compared}}},
        {"value", {{"stages", v.value.compared}}}, {"pair", settled.heads}};
  }
  layers[0].search["key"]["heads"] = std::move(confirmed.key.heads);
  layers[0].search["value"]["heads"] = std::move(confirmed.value.heads);
  return {std::move(layers[0]), {std::move(layers[1]), std::move(layers[2])}, std::move(choices)};
}

}  // namespace oscar
