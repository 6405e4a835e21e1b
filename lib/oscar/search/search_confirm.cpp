// Paired differences on queries that decided nothing before.
#include "oscar/search/search_confirm.h"

#include "oscar/fit/presets.h"
#include "oscar/search/search_record.h"

namespace oscar {
namespace {

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
ConfirmedSide confirm_side(const SideState& state, const Candidate& c, const LossTable& table,
                           const std::vector<int>& pairing_of) {
  ConfirmedSide result;
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
         {"clip", clip_text(chosen.recipe.clip_ratio)},
         {"writer", writer_text(chosen)},
         {"default_nmse", shortened(per_energy(table.total(pairing_of[0], head), unit))},
         {"nmse", shortened(per_energy(table.total(pairing_of[best], head), unit))},
         {"confirmed", std::move(steps)}});
  }
  return result;
}

}  // namespace

ConfirmedSides confirm_sides(const Candidate& candidate, const HeldBackHalf& half) {
  const Distinct keys = distinct(candidate.key.outcomes);
  Distinct values = distinct(candidate.value.outcomes);
  const size_t num_keys = keys.variants.size();
  const LossTable table =
      half.losses(keys.variants, values.variants, one_side_each(num_keys, values.variants.size()));
  for (int& i : values.index) i += static_cast<int>(num_keys);
  return {confirm_side(candidate.key, candidate, table, keys.index),
          confirm_side(candidate.value, candidate, table, values.index)};
}

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

}  // namespace oscar
