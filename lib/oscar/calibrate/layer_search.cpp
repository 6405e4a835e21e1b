// The order of the stages, the confirmation, and the record of both.
#include "oscar/calibrate/layer_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oscar/calibrate/search_stages.h"
#include "oscar/fit/portable.h"
#include "oscar/fit/presets.h"

namespace oscar {
namespace {

// Queries of a chunk: while searching, and where stages are confirmed. The final pair is confirmed
// on all of them.
constexpr int64_t kSearchQuick = 128, kSearchFull = 512;
constexpr int64_t kConfirmQuick = 256, kConfirmFull = 1024;
// A loss within this factor of the least may still win beside the other side's INT2 rows.
constexpr double kCloseCall = 1.25;

// One side of what is being decided: the outcome of each stage so far, the default first.
struct SideState {
  Side side;
  std::vector<SideVariant> outcomes;
  std::vector<std::string> stages;  // of outcomes but the first
  Json compared = Json::array();

  const SideVariant& current() const { return outcomes.back(); }
};

// A fit with everything that is searched on it.
struct Candidate {
  FitOptions fixed;
  SearchOptions search;
  bool pooled = false;  // one choice for all heads of the layer
  std::vector<FitVariant> fits;
  SideState key{.side = Side::kKey, .outcomes = {}, .stages = {}};
  SideState value{.side = Side::kValue, .outcomes = {}, .stages = {}};
};

std::string clip_text(float ratio) { return ratio > 0 ? fmt::format("{:.2f}", ratio) : "off"; }

std::string writer_text(const HeadChoice& head) {
  return fmt::format("{} {}", scale_correction_name(head.scale_correction),
                     rounding_name(head.rounding));
}

std::string fit_text(const FitVariant& fit) {
  return fmt::format("{} {} {}", method_name(fit.kind), fit.center ? "centred" : "uncentred",
                     granularity_name(fit.granularity));
}

const FitVariant& fit_of(const HeadChoice& head, Side side, const std::vector<FitVariant>& fits) {
  for (const FitVariant& fit : fits) {
    if (&fit.side(side) == head.fit) return fit;
  }
  return fits.front();
}

std::string label(const char* stage, const HeadChoice& head, Side side,
                  const std::vector<FitVariant>& fits) {
  if (std::string_view(stage) == "transform") return fit_text(fit_of(head, side, fits));
  return std::string_view(stage) == "writer" ? writer_text(head) : clip_text(head.clip_ratio);
}

// Four digits: the record is for people, and has to stay small.
double shortened(double value) {
  return std::isfinite(value) ? std::stod(fmt::format("{:.4g}", value)) : 0.0;
}

double per_energy(double loss, double energy) { return energy > 0 ? loss / energy : 0.0; }

void note_stage(SideState& state, const char* stage, const Candidate& candidate,
                const std::vector<SideVariant>& variants, const LossTable& table, int first) {
  Json names = Json::array(), losses = Json::array();
  for (size_t i = 0; i < variants.size(); ++i) {
    names.push_back(i == 0 ? "before" : label(stage, variants[i][0], state.side, candidate.fits));
    Json by_head = Json::array();
    for (int64_t head = 0; head < table.heads; ++head) {
      by_head.push_back(shortened(per_energy(table.total(first + static_cast<int64_t>(i), head),
                                             table.energy[static_cast<size_t>(head)])));
    }
    losses.push_back(std::move(by_head));
  }
  state.compared.push_back({{"stage", stage}, {"variants", names}, {"nmse", losses}});
}

// Per head the best of the fits of the fixed granularity; then, for the layer as a whole, whether a
// fit of the other granularity is better still.
SideVariant pick_transform(const std::vector<SideVariant>& variants, const Candidate& candidate,
                           LossTable table, int first) {
  const auto granularity = candidate.fixed.granularity;
  LossTable own = table;
  std::vector<int> index;  // of `own`'s pairings among the variants
  own.pairings = 0;
  own.sums.clear();
  for (size_t i = 0; i < variants.size(); ++i) {
    if (candidate.fits[i].granularity != granularity) continue;
    index.push_back(static_cast<int>(i));
    const auto begin =
        table.sums.begin() + (first + static_cast<int64_t>(i)) * table.heads * table.samples;
    own.sums.insert(own.sums.end(), begin, begin + table.heads * table.samples);
    ++own.pairings;
  }
  std::vector<int> picked = pick(own, 0, static_cast<int>(index.size()), candidate.pooled);
  for (int& i : picked) i = index[static_cast<size_t>(i)];
  SideVariant best = combine(variants, picked);
  int64_t of_best = table.add_combined(first, picked);
  for (size_t i = 0; i < variants.size(); ++i) {
    if (candidate.fits[i].granularity == granularity) continue;
    if (compare(table, first + static_cast<int64_t>(i), of_best, -1).better()) {
      best = variants[i];
      of_best = first + static_cast<int64_t>(i);
    }
  }
  return best;
}

std::vector<Pairing> one_side_each(size_t keys, size_t values) {
  std::vector<Pairing> pairings;
  for (size_t i = 0; i < keys; ++i) pairings.push_back({static_cast<int>(i), kExactRows});
  for (size_t i = 0; i < values; ++i) pairings.push_back({kExactRows, static_cast<int>(i)});
  return pairings;
}

void close_stage(SideState& state, const char* stage, SideVariant outcome) {
  state.outcomes.push_back(std::move(outcome));
  state.stages.emplace_back(stage);
}

void transform_stage(Candidate& c, const HeldBackHalf& half) {
  const auto keys = transform_variants(c.fits, Side::kKey, c.key.current(), c.fixed);
  const auto values = transform_variants(c.fits, Side::kValue, c.value.current(), c.fixed);
  const auto table = half.losses(keys, values, one_side_each(keys.size(), values.size()));
  const auto first = static_cast<int>(keys.size());
  note_stage(c.key, "transform", c, keys, table, 0);
  note_stage(c.value, "transform", c, values, table, first);
  close_stage(c.key, "transform", pick_transform(keys, c, table, 0));
  close_stage(c.value, "transform", pick_transform(values, c, table, first));
}

// The first variant and those that were a close call for some head.
std::vector<SideVariant> close_calls(const std::vector<SideVariant>& variants,
                                     const LossTable& table, int first) {
  std::vector<bool> keep(variants.size(), false);
  keep[0] = true;
  for (int64_t head = 0; head < table.heads; ++head) {
    std::vector<double> losses;
    for (size_t i = 0; i < variants.size(); ++i) {
      losses.push_back(table.total(first + static_cast<int64_t>(i), head));
    }
    const double most = kCloseCall * *std::min_element(losses.begin(), losses.end());
    for (size_t i = 0; i < losses.size(); ++i) keep[i] = keep[i] || losses[i] <= most;
  }
  std::vector<SideVariant> result;
  for (size_t i = 0; i < variants.size(); ++i) {
    if (keep[i]) result.push_back(variants[i]);
  }
  return result;
}

// Clip or writer: the same variants for both sides, each with the other exact; then, if asked for,
// keys beside the values just chosen, and values beside the keys chosen then, of the close calls.
template <typename MakeVariants>
void side_stage(Candidate& c, const char* stage, bool twice, const HeldBackHalf& half,
                MakeVariants make) {
  auto keys = make(c.key.current()), values = make(c.value.current());
  const auto num_keys = static_cast<int>(keys.size());
  const auto num_values = static_cast<int>(values.size());
  auto table = half.losses(keys, values, one_side_each(keys.size(), values.size()));
  SideVariant key = combine(keys, pick(table, 0, num_keys, c.pooled));
  SideVariant value = combine(values, pick(table, num_keys, num_values, c.pooled));
  note_stage(c.key, stage, c, keys, table, 0);
  note_stage(c.value, stage, c, values, table, num_keys);
  if (twice) {
    keys = close_calls(keys, table, 0);
    values = close_calls(values, table, num_keys);
    std::vector<Pairing> pairings;
    for (size_t i = 0; i < keys.size(); ++i) pairings.push_back({static_cast<int>(i), 0});
    table = half.losses(keys, {value}, pairings);
    key = combine(keys, pick(table, 0, static_cast<int>(keys.size()), c.pooled));
    note_stage(c.key, stage, c, keys, table, 0);
    pairings.clear();
    for (size_t i = 0; i < values.size(); ++i) pairings.push_back({0, static_cast<int>(i)});
    table = half.losses({key}, values, pairings);
    value = combine(values, pick(table, 0, static_cast<int>(values.size()), c.pooled));
    note_stage(c.value, stage, c, values, table, 0);
  }
  close_stage(c.key, stage, std::move(key));
  close_stage(c.value, stage, std::move(value));
}

void run_stages(Candidate& c, const HeldBackHalf& half) {
  c.key.outcomes = {variant_of(c.fits.front(), Side::kKey, c.fixed)};
  c.value.outcomes = {variant_of(c.fits.front(), Side::kValue, c.fixed)};
  if (c.fits.size() > 1) transform_stage(c, half);
  if (c.search.clip) {
    side_stage(c, "clip", /*twice=*/!c.pooled, half,
               [&](const SideVariant& current) { return clip_variants(current, c.search); });
  }
  if (c.search.rounding || c.search.scale_correction) {
    side_stage(c, "writer", /*twice=*/false, half,
               [&](const SideVariant& current) { return writer_variants(current, c.search); });
  }
}

// One side's outcome after confirmation, with the reason of each head.
struct Confirmed {
  SideVariant variant;
  Json heads = Json::array();
};

// Outcomes without repetition, and which of them each outcome is.
struct Distinct {
  std::vector<SideVariant> variants;
  std::vector<int> index;
};

Distinct distinct(const std::vector<SideVariant>& outcomes) {
  Distinct result;
  for (const SideVariant& outcome : outcomes) {
    size_t i = 0;
    while (i < result.variants.size() && !same_variant(result.variants[i], outcome)) ++i;
    if (i == result.variants.size()) result.variants.push_back(outcome);
    result.index.push_back(static_cast<int>(i));
  }
  return result;
}

// Pairing pairing_of[i] of `table` is outcome i of the side.
Confirmed confirm_side(const SideState& state, const Candidate& c, const LossTable& table,
                       const std::vector<int>& pairing_of) {
  Confirmed result;
  for (int64_t head = 0; head < table.heads; ++head) {
    const double unit = table.energy[static_cast<size_t>(head)];
    size_t best = 0;
    Json steps = Json::array();
    for (size_t i = 1; i < state.outcomes.size(); ++i) {
      const HeadChoice& before = state.outcomes[best][head];
      const HeadChoice& after = state.outcomes[i][head];
      if (same_variant({before}, {after})) continue;
      // Another granularity was chosen for the layer, and is confirmed for the layer.
      const bool pooled =
          fit_of(after, state.side, c.fits).granularity != c.fixed.granularity && best == 0;
      const LossDifference against =
          compare(table, pairing_of[i], pairing_of[best], pooled ? -1 : head);
      steps.push_back({{"stage", state.stages[i - 1]},
                       {"nmse", shortened(per_energy(table.total(pairing_of[i], head), unit))},
                       {"difference", shortened(per_energy(against.difference, unit))},
                       {"standard_error", shortened(per_energy(against.standard_error, unit))},
                       {"accepted", against.better()}});
      if (against.better()) best = i;
    }
    const HeadChoice& chosen = state.outcomes[best][head];
    const FitVariant& fit = fit_of(chosen, state.side, c.fits);
    result.variant.push_back(chosen);
    result.heads.push_back(
        {{"transform", fit_text(fit)},
         {"clip", clip_text(chosen.clip_ratio)},
         {"writer", writer_text(chosen)},
         {"default_nmse", shortened(per_energy(table.total(pairing_of[0], head), unit))},
         {"nmse", shortened(per_energy(table.total(pairing_of[best], head), unit))},
         {"confirmed", std::move(steps)}});
  }
  return result;
}

LayerTransforms assemble_layer(const Candidate& c, const SideVariant& key,
                               const SideVariant& value) {
  LayerTransforms layer;
  layer.geometry = c.fits.front().fit.geometry;
  layer.warnings = c.fits.front().fit.warnings;
  layer.key = compose_heads(key, Side::kKey);
  layer.value = compose_heads(value, Side::kValue);
  return layer;
}

// Keeps the default pair of a head (of the layer when pooled) whose final pair is not better.
struct FinalPair {
  SideVariant key, value;
  std::vector<double> nmse;
  Json heads = Json::array();
};

FinalPair settle(const Candidate& c, SideVariant key, SideVariant value, const HeldBackHalf& half) {
  std::vector<SideVariant> keys = {c.key.outcomes.front()}, values = {c.value.outcomes.front()};
  std::vector<Pairing> pairings = {{0, 0}};
  if (!same_variant(key, keys[0]) || !same_variant(value, values[0])) {
    keys.push_back(key);
    values.push_back(value);
    pairings.push_back({1, 1});
  }
  const LossTable table = half.losses(keys, values, pairings);
  const int64_t final_pair = table.pairings - 1;
  FinalPair result{.key = std::move(key), .value = std::move(value), .nmse = {}};
  for (int64_t head = 0; head < table.heads; ++head) {
    const auto h = static_cast<size_t>(head);
    const LossDifference against = compare(table, final_pair, 0, c.pooled ? -1 : head);
    const bool keep = c.pooled ? against.better() : against.difference <= 0;
    if (!keep) {
      result.key[h] = keys[0][h];
      result.value[h] = values[0][h];
    }
    const double chosen = table.total(keep ? final_pair : 0, head);
    result.nmse.push_back(per_energy(chosen, table.energy[h]));
    result.heads.push_back(
        {{"default_nmse", shortened(per_energy(table.total(0, head), table.energy[h]))},
         {"nmse", shortened(result.nmse.back())},
         {"default_kept", !keep}});
  }
  return result;
}

Candidate portable_candidate(const LayerStatistics& statistics, const FitOptions& fixed,
                             const Rope& rope, Granularity granularity,
                             const SearchOptions& search) {
  Candidate c;
  c.fixed = portable_options(fixed, granularity);
  c.search = {.clip = true, .full = search.full};
  c.pooled = true;
  std::vector<FitOptions> wanted(2, c.fixed);
  wanted[1].kind = TransformKind::kHadamard;
  c.fits = fit_all(statistics, wanted, rope);
  return c;
}

LossSettings loss_settings(const LayerSearchTask& task) {
  const LayerGeometry& g = task.statistics.geometry;
  return {.quantizer = task.quantizer,
          .layer = g.layer_id,
          .sliding_window = g.sliding_window,
          .sm_scale = 1.0 / std::sqrt(static_cast<double>(g.head_dim_k)),
          .output_metric = task.output_metric};
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

LayerChoice search_layer(const LayerSearchTask& task, const HeldBackLayer& held_back) {
  const LossSettings settings = loss_settings(task);
  std::vector<Candidate> candidates(1);
  candidates.reserve(3);
  candidates[0].fixed = task.fixed;
  candidates[0].search = task.search;
  candidates[0].fits = fit_variants(task.statistics, task.fixed, task.search, task.rope);
  for (const auto granularity : {Granularity::kShared, Granularity::kPerHead}) {
    candidates.push_back(
        portable_candidate(task.statistics, task.fixed, task.rope, granularity, task.search));
  }
  int64_t searched_queries = 0;
  {
    const auto half = HeldBackHalf::sampled(
        held_back.search, settings, task.search.full ? kSearchFull : kSearchQuick, task.seed, true);
    searched_queries = half.num_queries();
    for (Candidate& c : candidates) run_stages(c, half);
  }

  const auto sample =
      HeldBackHalf::sampled(held_back.confirm, settings,
                            task.search.full ? kConfirmFull : kConfirmQuick, ~task.seed, false);
  Candidate& best = candidates[0];
  const Distinct own_keys = distinct(best.key.outcomes);
  Distinct own_values = distinct(best.value.outcomes);
  const size_t num_keys = own_keys.variants.size();
  const LossTable sides = sample.losses(own_keys.variants, own_values.variants,
                                        one_side_each(num_keys, own_values.variants.size()));
  for (int& i : own_values.index) i += static_cast<int>(num_keys);
  const Confirmed key = confirm_side(best.key, best, sides, own_keys.index);
  const Confirmed value = confirm_side(best.value, best, sides, own_values.index);

  // Both sides INT2: the default pair beside the searched one, the main fit's on every query.
  const auto all = HeldBackHalf::all_queries(held_back.confirm, settings);
  std::vector<LayerTransforms> layers;
  for (const Candidate& c : candidates) {
    const bool main = &c == &best;
    const HeldBackHalf& half = main ? all : sample;
    const FinalPair settled = settle(c, main ? key.variant : c.key.current(),
                                     main ? value.variant : c.value.current(), half);
    layers.push_back(assemble_layer(c, settled.key, settled.value));
    if (!main) layers.back().warnings.clear();  // those of the layer itself
    layers.back().predicted_output_nmse = settled.nmse;
    layers.back().search = {
        {"search_queries", searched_queries},      {"stage_queries", sample.num_queries()},
        {"confirm_queries", half.num_queries()},   {"key", {{"stages", c.key.compared}}},
        {"value", {{"stages", c.value.compared}}}, {"pair", settled.heads}};
  }
  layers[0].search["key"]["heads"] = key.heads;
  layers[0].search["value"]["heads"] = value.heads;
  return {std::move(layers[0]), {std::move(layers[1]), std::move(layers[2])}};
}

}  // namespace oscar
