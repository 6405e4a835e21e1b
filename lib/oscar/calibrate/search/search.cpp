// Choosing for a layer, in stages, and confirming it on other text (math 9).
#include "oscar/calibrate/search/search.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/cache/codec.h"
#include "oscar/calibrate/search/pass.h"
#include "oscar/fit/fit.h"

namespace oscar {

// From fits to one decision: the stages on the search half, then confirmation on the other.

namespace {

// Queries of a sequence where stages are confirmed; the final pair is confirmed on all of them.
// Those while searching: pass.h.
constexpr int64_t kConfirmQueries = 256;

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
    v.search = {.clip = true};
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
    const auto half =
        HeldBackHalf::sampled(held_back.search, settings, kSearchQueries, task.seed, true);
    searched_queries = half.num_queries();
    for (VariantSearch& v : variants) run_stages(v, half);
  }

  stop_if_requested();
  const auto sample =
      HeldBackHalf::sampled(held_back.confirm, settings, kConfirmQueries, ~task.seed, false);
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

// CBOR, which keeps every number as it is; choices as they lie in memory.

namespace {

static_assert(std::is_trivially_copyable_v<HeadChoice>);

Json choices_json(const std::vector<HeadChoice>& heads) {
  std::vector<uint8_t> bytes(heads.size() * sizeof(HeadChoice));
  if (!heads.empty()) std::memcpy(bytes.data(), heads.data(), bytes.size());
  return Json::binary(std::move(bytes));
}

std::vector<HeadChoice> choices_from(const Json& json, size_t heads) {
  const auto& bytes = json.get_binary();
  if (bytes.size() != heads * sizeof(HeadChoice)) throw std::length_error("choices");
  std::vector<HeadChoice> choices(heads);
  std::memcpy(choices.data(), bytes.data(), bytes.size());
  return choices;
}

Json losses_json(const std::optional<ClipLosses>& losses) {
  if (!losses) return nullptr;
  return {losses->ratio, losses->nmse.data};
}

std::optional<ClipLosses> losses_from(const Json& json, int heads) {
  if (json.is_null()) return std::nullopt;
  ClipLosses losses{.ratio = json.at(0).get<std::vector<float>>(), .nmse = {}};
  losses.nmse.count = static_cast<int>(losses.ratio.size());
  losses.nmse.cols = heads;
  losses.nmse.data = json.at(1).get<std::vector<double>>();
  return losses;
}

Json layer_json(const LayerTransforms& layer) {
  return {losses_json(layer.key.clip_losses), losses_json(layer.value.clip_losses),
          layer.predicted_output_nmse, layer.warnings, layer.search};
}

LayerTransforms layer_from(const Json& json, const LayerGeometry& geometry) {
  LayerTransforms layer;
  layer.geometry = geometry;
  layer.key.clip_losses = losses_from(json.at(0), geometry.num_kv_heads);
  layer.value.clip_losses = losses_from(json.at(1), geometry.num_kv_heads);
  layer.predicted_output_nmse = json.at(2).get<std::vector<double>>();
  layer.warnings = json.at(3).get<std::vector<std::string>>();
  layer.search = json.at(4);
  return layer;
}

}  // namespace

std::vector<uint8_t> decision_bytes(const LayerDecision& decision) {
  Json json = {layer_json(decision.main), layer_json(decision.portable.shared),
               layer_json(decision.portable.per_head), Json::array()};
  for (const VariantChoice& choice : decision.choices) {
    json[3].push_back({choices_json(choice.key), choices_json(choice.value)});
  }
  return Json::to_cbor(json);
}

LayerDecision decision_from_bytes(const std::vector<uint8_t>& bytes,
                                  const LayerGeometry& geometry) {
  try {
    const Json json = Json::from_cbor(bytes);
    LayerDecision decision{layer_from(json.at(0), geometry),
                           {layer_from(json.at(1), geometry), layer_from(json.at(2), geometry)}};
    const auto heads = static_cast<size_t>(geometry.num_kv_heads);
    for (const Json& choice : json.at(3)) {
      decision.choices.push_back(
          {choices_from(choice.at(0), heads), choices_from(choice.at(1), heads)});
    }
    return decision;
  } catch (const std::exception& error) {
    throw Error({.what = "what another process has decided cannot be read",
                 .where = "layer " + std::to_string(geometry.layer_id),
                 .found = error.what()});
  }
}

// Lists of candidates, the rule that ties go to the first of them, and the order of the stages.

namespace {

// Around the presets' .92 and .96. Off is none of them: two bits hardly ever want it.
constexpr std::array kClips = {0.84f, 0.88f, 0.90f, 0.94f, 0.96f};

// A loss within this factor of the least may still win beside the other side's INT2 rows.
constexpr double kCloseCall = 1.25;

// What each stage compares; the first is what it began with.
Candidates transform_candidates(const VariantSearch& v, const SideSearch& side) {
  Candidates candidates = {side.current()};
  for (size_t i = 1; i < v.fits.size(); ++i) {
    candidates.push_back(candidate_of(v.fits[i], side.side, v.fixed));
  }
  return candidates;
}

Candidates clip_candidates(const Candidate& current) {
  Candidates candidates = {current};
  const int d = current.front().fit->forward.rows;
  // What a ratio does: the rank of the magnitude it clips at; at the largest one nothing is
  // clipped.
  const auto effect = [d](float ratio) {
    const int rank = clip_threshold_index(ratio, d);
    return rank == d - 1 ? -1 : rank;
  };
  std::vector<int> effects = {effect(current.front().recipe.clip_ratio)};
  const auto add = [&](float clip) {
    if (std::find(effects.begin(), effects.end(), effect(clip)) != effects.end()) return;
    effects.push_back(effect(clip));
    Candidate candidate = current;
    for (FittedHead& head : candidate) head.recipe.clip_ratio = clip;
    candidates.push_back(std::move(candidate));
  };
  std::for_each(kClips.begin(), kClips.end(), add);
  return candidates;
}

Candidates writer_candidates(const Candidate& current, const SearchOptions& search) {
  Candidates candidates = {current};
  using enum ScaleCorrection;
  // After shaped rounding `unbiased` is wrong (math 5.3).
  for (const auto& [correction, rounding] : {std::pair{kMetric, Rounding::kShaped},
                                             {kNone, Rounding::kShaped},
                                             {kMetric, Rounding::kPlain},
                                             {kUnbiased, Rounding::kPlain},
                                             {kNone, Rounding::kPlain}}) {
    Candidate candidate = current;
    const RowRecipe& now = current.front().recipe;
    if (!search.rounding && rounding != now.rounding) continue;
    if (!search.scale_correction && correction != now.scale_correction) continue;
    for (FittedHead& head : candidate) {
      head.recipe.scale_correction = correction;
      head.recipe.rounding = rounding;
    }
    if (!same_candidate(candidate, current)) candidates.push_back(std::move(candidate));
  }
  return candidates;
}

// Pair `first + i` of `table` is candidate i of `count`. Of each head the candidate of least loss
// among those that beat candidate 0 by more than a paired standard error, else candidate 0.
// `pooled`: one for all heads, by the sum of their losses.
std::vector<int> pick(const LossTable& table, int first, size_t count, bool pooled) {
  std::vector<int> picked(static_cast<size_t>(table.heads), 0);
  for (int64_t head = 0; head < table.heads; ++head) {
    double least = 0;
    for (int i = 1; i < static_cast<int>(count); ++i) {
      const LossDifference against = compare(table, first + i, first, pooled ? -1 : head);
      if (against.better() && against.difference < least) {
        least = against.difference;
        picked[static_cast<size_t>(head)] = i;
      }
    }
  }
  return picked;
}

// Head h from candidates[picked[h]].
Candidate combine(const Candidates& candidates, const std::vector<int>& picked) {
  Candidate result;
  for (size_t head = 0; head < picked.size(); ++head) {
    result.push_back(candidates[static_cast<size_t>(picked[head])][head]);
  }
  return result;
}

Candidate best_of(const Candidates& candidates, const LossTable& table, int first, bool pooled) {
  return combine(candidates, pick(table, first, candidates.size(), pooled));
}

// Adds a comparison to the side's record; `text` names a candidate by one of its heads.
// Pair `first + i` of `table` is candidates[i]. The format calls candidates `variants`.
template <typename Text>
void note_stage(SideSearch& side, const char* stage, const Candidates& candidates,
                const LossTable& table, int first, const Text& text) {
  Json names = Json::array(), losses = Json::array();
  for (size_t i = 0; i < candidates.size(); ++i) {
    names.push_back(i == 0 ? "before" : text(side, candidates[i].front()));
    Json by_head = Json::array();
    for (int64_t head = 0; head < table.heads; ++head) {
      by_head.push_back(four_digits(table.nmse(first + static_cast<int64_t>(i), head)));
    }
    losses.push_back(std::move(by_head));
  }
  side.compared.push_back({{"stage", stage}, {"variants", names}, {"nmse", losses}});
}

// Losses of candidates that differ in nothing but the ratio; pair `first + i` is candidates[i].
ClipLosses clip_losses(const Candidates& candidates, const LossTable& table, int first) {
  const auto count = static_cast<int>(candidates.size());
  ClipLosses losses{.ratio = {}, .nmse = {count, static_cast<int>(table.heads)}};
  for (int i = 0; i < count; ++i) {
    losses.ratio.push_back(candidates[static_cast<size_t>(i)].front().recipe.clip_ratio);
    for (int head = 0; head < losses.nmse.cols; ++head) {
      losses.nmse[i](head) = table.nmse(first + i, head);
    }
  }
  return losses;
}

// Per head the best of the fits of the fixed granularity; then, for the layer as a whole, whether a
// fit of the other granularity is better still.
Candidate pick_transform(const Candidates& candidates, const VariantSearch& v, LossTable table,
                         int first) {
  const auto is_fixed_granularity = [&](size_t i) {
    return v.fits[i].request.options.granularity == v.fixed.granularity;
  };
  LossTable own = table;
  std::vector<int> index;  // of `own`'s pairs among the candidates
  own.pairs = 0;
  own.sums.clear();
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (!is_fixed_granularity(i)) continue;
    index.push_back(static_cast<int>(i));
    const auto begin =
        table.sums.begin() + (first + static_cast<int64_t>(i)) * table.heads * table.blocks;
    own.sums.insert(own.sums.end(), begin, begin + table.heads * table.blocks);
    ++own.pairs;
  }
  std::vector<int> picked = pick(own, 0, index.size(), v.pooled);
  for (int& i : picked) i = index[static_cast<size_t>(i)];
  Candidate best = combine(candidates, picked);
  int64_t of_best = table.add_combined(first, picked);
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (is_fixed_granularity(i)) continue;
    if (compare(table, first + static_cast<int64_t>(i), of_best, -1).better()) {
      best = candidates[i];
      of_best = first + static_cast<int64_t>(i);
    }
  }
  return best;
}

void transform_stage(VariantSearch& v, const HeldBackHalf& half) {
  const Candidates keys = transform_candidates(v, v.key), values = transform_candidates(v, v.value);
  const auto table = half.losses(keys, values, one_side_each(keys.size(), values.size()));
  const auto first = static_cast<int>(keys.size());
  const auto text = [&](const SideSearch& side, const FittedHead& head) {
    return fit_text(fit_of(head, side.side, v.fits));
  };
  note_stage(v.key, "transform", keys, table, 0, text);
  note_stage(v.value, "transform", values, table, first, text);
  v.key.winners.push_back({"transform", pick_transform(keys, v, table, 0)});
  v.value.winners.push_back({"transform", pick_transform(values, v, table, first)});
}

// The first candidate and those that were a close call for some head.
Candidates close_calls(const Candidates& candidates, const LossTable& table, int first) {
  std::vector<bool> keep(candidates.size(), false);
  keep[0] = true;
  for (int64_t head = 0; head < table.heads; ++head) {
    std::vector<double> losses;
    for (size_t i = 0; i < candidates.size(); ++i) {
      losses.push_back(table.total(first + static_cast<int64_t>(i), head));
    }
    const double most = kCloseCall * *std::min_element(losses.begin(), losses.end());
    for (size_t i = 0; i < losses.size(); ++i) keep[i] = keep[i] || losses[i] <= most;
  }
  Candidates result;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (keep[i]) result.push_back(candidates[i]);
  }
  return result;
}

// Each side with the other exact; then, unless pooled, the close calls once more: keys beside the
// values just picked, and values beside the keys picked then.
void clip_stage(VariantSearch& v, const HeldBackHalf& half) {
  const auto text = [](const SideSearch&, const FittedHead& head) {
    return clip_text(head.recipe.clip_ratio);
  };
  Candidates keys = clip_candidates(v.key.current());
  Candidates values = clip_candidates(v.value.current());
  auto table = half.losses(keys, values, one_side_each(keys.size(), values.size()));
  const auto first = static_cast<int>(keys.size());
  Candidate key = best_of(keys, table, 0, v.pooled);
  Candidate value = best_of(values, table, first, v.pooled);
  note_stage(v.key, "clip", keys, table, 0, text);
  note_stage(v.value, "clip", values, table, first, text);
  v.key.clip_losses = clip_losses(keys, table, 0);
  v.value.clip_losses = clip_losses(values, table, first);
  if (!v.pooled) {
    keys = close_calls(keys, table, 0);
    values = close_calls(values, table, first);
    std::vector<CandidatePair> pairs;
    for (size_t i = 0; i < keys.size(); ++i) pairs.push_back({static_cast<int>(i), 0});
    table = half.losses(keys, {value}, pairs);
    key = best_of(keys, table, 0, v.pooled);
    note_stage(v.key, "clip", keys, table, 0, text);
    pairs.clear();
    for (size_t i = 0; i < values.size(); ++i) pairs.push_back({0, static_cast<int>(i)});
    table = half.losses({key}, values, pairs);
    value = best_of(values, table, 0, v.pooled);
    note_stage(v.value, "clip", values, table, 0, text);
  }
  v.key.winners.push_back({"clip", std::move(key)});
  v.value.winners.push_back({"clip", std::move(value)});
}

// Each side with the other exact.
void writer_stage(VariantSearch& v, const HeldBackHalf& half) {
  const auto text = [](const SideSearch&, const FittedHead& head) {
    return writer_text(head.recipe);
  };
  const Candidates keys = writer_candidates(v.key.current(), v.search);
  const Candidates values = writer_candidates(v.value.current(), v.search);
  const auto table = half.losses(keys, values, one_side_each(keys.size(), values.size()));
  const auto first = static_cast<int>(keys.size());
  note_stage(v.key, "writer", keys, table, 0, text);
  note_stage(v.value, "writer", values, table, first, text);
  v.key.winners.push_back({"writer", best_of(keys, table, 0, v.pooled)});
  v.value.winners.push_back({"writer", best_of(values, table, first, v.pooled)});
}

}  // namespace

std::vector<FitRequest> fit_requests(const FitOptions& fixed, const SearchOptions& search) {
  std::vector<FitRequest> kinds = {{fixed}};
  if (search.kind) {
    for (const auto& [kind, own_basis] : {std::pair{TransformKind::kBalanced, false},
                                          {TransformKind::kOscar, false},
                                          {TransformKind::kOscar, true},
                                          {TransformKind::kHadamard, false}}) {
      if (kind == TransformKind::kBalanced && search.orthogonal) continue;
      if (kind == fixed.kind && !own_basis) continue;
      kinds.push_back({fixed, own_basis});
      kinds.back().options.kind = kind;
    }
  }
  std::vector<FitRequest> wanted;
  for (const FitRequest& kind : kinds) {
    const bool fitted =
        kind.options.kind == TransformKind::kOscar || kind.options.kind == TransformKind::kBalanced;
    FitRequest request = kind;
    if (search.rounding) request.options.rounding = Rounding::kShaped;
    request.options.scale_correction = ScaleCorrection::kMetric;
    wanted.push_back(request);
    if (search.center) {
      wanted.push_back(request);
      wanted.back().options.center = !fixed.center;
      wanted.back().options.key_centers = false;
    }
    if (search.key_centers) {
      wanted.push_back(request);
      wanted.back().options.key_centers = !fixed.key_centers;
    }
    if (search.row_weights && fitted && !kind.own_basis) {
      wanted.push_back(request);
      FitOptions& other = wanted.back().options;
      other.row_weights =
          fixed.row_weights == RowWeights::kEven ? RowWeights::kAttention : RowWeights::kEven;
      other.key_centers = false;
    }
    // Without data in it, a transform is the same for all heads anyway.
    if (search.granularity && fitted && !kind.own_basis) {
      wanted.push_back(request);
      wanted.back().options.granularity =
          fixed.granularity == Granularity::kShared ? Granularity::kPerHead : Granularity::kShared;
    }
  }
  return wanted;
}

void run_stages(VariantSearch& v, const HeldBackHalf& half) {
  v.key.fixed = candidate_of(v.fits.front(), Side::kKey, v.fixed);
  v.value.fixed = candidate_of(v.fits.front(), Side::kValue, v.fixed);
  // Stages take seconds on a large model: a request to stop does not wait for the layer's end.
  stop_if_requested();
  if (v.fits.size() > 1) transform_stage(v, half);
  if (v.search.clip) {
    stop_if_requested();
    clip_stage(v, half);
  }
  if (v.search.rounding || v.search.scale_correction) {
    stop_if_requested();
    writer_stage(v, half);
  }
}

// Paired differences on queries that decided nothing before.

namespace {

// What stands after 0, 1, .. stages, without repetition.
struct Distinct {
  Candidates candidates;
  std::vector<int> index;  // [stages + 1] into candidates
};

Distinct distinct(const SideSearch& side) {
  Distinct result;
  for (size_t stages = 0; stages <= side.winners.size(); ++stages) {
    const Candidate& candidate = side.after(stages);
    size_t i = 0;
    while (i < result.candidates.size() && !same_candidate(result.candidates[i], candidate)) ++i;
    if (i == result.candidates.size()) result.candidates.push_back(candidate);
    result.index.push_back(static_cast<int>(i));
  }
  return result;
}

// Pair pair_of[i] of `table` is what stands after i stages.
ConfirmedSide confirm_side(const SideSearch& side, const VariantSearch& v, const LossTable& table,
                           const std::vector<int>& pair_of) {
  ConfirmedSide result;
  for (int64_t head = 0; head < table.heads; ++head) {
    const auto share = [&](double loss) { return four_digits(table.share(loss, head)); };
    const auto nmse = [&](size_t i) { return four_digits(table.nmse(pair_of[i], head)); };
    size_t accepted = 0;
    Json steps = Json::array();
    for (size_t i = 1; i < pair_of.size(); ++i) {
      const FittedHead& before = side.after(accepted)[head];
      const FittedHead& after = side.after(i)[head];
      if (same_candidate({before}, {after})) continue;
      // Another granularity was picked for the layer, and is confirmed for the layer.
      const FitRequest& request = fit_of(after, side.side, v.fits).request;
      const bool pooled = request.options.granularity != v.fixed.granularity && accepted == 0;
      const LossDifference against =
          compare(table, pair_of[i], pair_of[accepted], pooled ? -1 : head);
      steps.push_back({{"stage", side.winners[i - 1].stage},
                       {"nmse", nmse(i)},
                       {"difference", share(against.difference)},
                       {"standard_error", share(against.standard_error)},
                       {"accepted", against.better()}});
      if (against.better()) accepted = i;
    }
    const FittedHead& confirmed = side.after(accepted)[head];
    result.candidate.push_back(confirmed);
    result.heads.push_back({{"transform", fit_text(fit_of(confirmed, side.side, v.fits))},
                            {"clip", clip_text(confirmed.recipe.clip_ratio)},
                            {"writer", writer_text(confirmed.recipe)},
                            {"default_nmse", nmse(0)},
                            {"nmse", nmse(accepted)},
                            {"confirmed", std::move(steps)}});
  }
  return result;
}

}  // namespace

ConfirmedSides confirm_sides(const VariantSearch& v, const HeldBackHalf& half) {
  const Distinct keys = distinct(v.key);
  Distinct values = distinct(v.value);
  const size_t num_keys = keys.candidates.size(), num_values = values.candidates.size();
  const LossTable table =
      half.losses(keys.candidates, values.candidates, one_side_each(num_keys, num_values));
  for (int& i : values.index) i += static_cast<int>(num_keys);
  return {confirm_side(v.key, v, table, keys.index), confirm_side(v.value, v, table, values.index)};
}

SettledPair settle(const VariantSearch& v, Candidate key, Candidate value,
                   const HeldBackHalf& half) {
  Candidates keys = {v.key.fixed}, values = {v.value.fixed};
  std::vector<CandidatePair> pairs = {{0, 0}};
  if (!same_candidate(key, keys[0]) || !same_candidate(value, values[0])) {
    keys.push_back(key);
    values.push_back(value);
    pairs.push_back({1, 1});
  }
  const int64_t given = static_cast<int64_t>(pairs.size()) - 1;
  if (v.fallback) {
    const FitOptions& options = v.fallback->request.options;
    keys.push_back(candidate_of(*v.fallback, Side::kKey, options));
    values.push_back(candidate_of(*v.fallback, Side::kValue, options));
    const int last = static_cast<int>(keys.size()) - 1;
    pairs.push_back({last, last});
  }
  const LossTable table = half.losses(keys, values, pairs);
  SettledPair result{.key = std::move(key), .value = std::move(value), .nmse = {}};
  for (int64_t head = 0; head < table.heads; ++head) {
    const auto h = static_cast<size_t>(head);
    const LossDifference against = compare(table, given, 0, v.pooled ? -1 : head);
    const bool keep = v.pooled ? against.better() : against.difference <= 0;
    int64_t kept = keep ? given : 0;
    const bool falls_back = v.fallback && compare(table, given + 1, kept, head).better();
    if (falls_back) kept = given + 1;
    if (kept != given) {
      const CandidatePair& pair = pairs[static_cast<size_t>(kept)];
      result.key[h] = keys[static_cast<size_t>(pair.key)][h];
      result.value[h] = values[static_cast<size_t>(pair.value)][h];
    }
    result.nmse.push_back(table.nmse(kept, head));
    result.heads.push_back({{"default_nmse", four_digits(table.nmse(0, head))},
                            {"nmse", four_digits(result.nmse.back())},
                            {"default_kept", !keep && !falls_back}});
    if (v.fallback) {
      result.heads.back()["fallback_nmse"] = four_digits(table.nmse(given + 1, head));
      result.heads.back()["fell_back"] = falls_back;
    }
  }
  return result;
}

}  // namespace oscar
