// Lists of candidates, the rule that ties go to the first of them, and the order of the stages.
#include "oscar/search/stages.h"

#include <algorithm>
#include <array>

#include "oscar/base/interrupt.h"
#include "oscar/cache/codec.h"
#include "oscar/fit/presets.h"

namespace oscar {
namespace {

// Around the presets' .92 and .96. 0 is off, which two bits hardly ever want; 1 would clip nothing
// either.
constexpr std::array kQuickClips = {0.84f, 0.88f, 0.90f, 0.94f, 0.96f};
constexpr std::array kFullClips = {0.80f, 0.84f, 0.88f, 0.90f, 0.92f, 0.94f,
                                   0.95f, 0.96f, 0.97f, 0.98f, 0.0f};

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

Candidates clip_candidates(const Candidate& current, const SearchOptions& search) {
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
  if (search.full) {
    std::for_each(kFullClips.begin(), kFullClips.end(), add);
  } else {
    std::for_each(kQuickClips.begin(), kQuickClips.end(), add);
  }
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
  Candidates keys = clip_candidates(v.key.current(), v.search);
  Candidates values = clip_candidates(v.value.current(), v.search);
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
      wanted.back().options.key_centres = false;
    }
    if (search.key_centres) {
      wanted.push_back(request);
      wanted.back().options.key_centres = !fixed.key_centres;
    }
    if (search.row_weights && fitted && !kind.own_basis) {
      wanted.push_back(request);
      FitOptions& other = wanted.back().options;
      other.row_weights =
          fixed.row_weights == RowWeights::kEven ? RowWeights::kAttention : RowWeights::kEven;
      other.key_centres = false;
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

}  // namespace oscar
