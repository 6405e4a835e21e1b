// Paired differences on queries that decided nothing before.
#include "oscar/search/confirm.h"

#include "oscar/fit/presets.h"

namespace oscar {
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
