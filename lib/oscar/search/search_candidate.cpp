// The order of the stages, and what each one picks.
#include "oscar/search/search_candidate.h"

#include <algorithm>
#include <string_view>

#include "oscar/base/interrupt.h"
#include "oscar/search/search_record.h"

namespace oscar {
namespace {

// A loss within this factor of the least may still win beside the other side's INT2 rows.
constexpr double kCloseCall = 1.25;

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
  if (std::string_view(stage) == "clip") {
    c.key.clip_losses = clip_losses(keys, table, 0);
    c.value.clip_losses = clip_losses(values, table, num_keys);
  }
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

}  // namespace

std::vector<Pairing> one_side_each(size_t keys, size_t values) {
  std::vector<Pairing> pairings;
  for (size_t i = 0; i < keys; ++i) pairings.push_back({static_cast<int>(i), kExactRows});
  for (size_t i = 0; i < values; ++i) pairings.push_back({kExactRows, static_cast<int>(i)});
  return pairings;
}

void run_stages(Candidate& c, const HeldBackHalf& half) {
  c.key.outcomes = {variant_of(c.fits.front(), Side::kKey, c.fixed)};
  c.value.outcomes = {variant_of(c.fits.front(), Side::kValue, c.fixed)};
  // Stages take seconds on a large model: a request to stop does not wait for the layer's end.
  stop_if_requested();
  if (c.fits.size() > 1) transform_stage(c, half);
  if (c.search.clip) {
    stop_if_requested();
    side_stage(c, "clip", /*twice=*/!c.pooled, half,
               [&](const SideVariant& current) { return clip_variants(current, c.search); });
  }
  if (c.search.rounding || c.search.scale_correction) {
    stop_if_requested();
    side_stage(c, "writer", /*twice=*/false, half,
               [&](const SideVariant& current) { return writer_variants(current, c.search); });
  }
}

}  // namespace oscar
