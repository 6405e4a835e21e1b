// Candidate lists and the rule that ties go to the default.
#include "oscar/search/search_stages.h"

#include <algorithm>
#include <array>

#include "oscar/cache/codec.h"

namespace oscar {
namespace {

// Around the presets' .92 and .96. 0 is off, which two bits hardly ever want; 1 would clip nothing
// either.
constexpr std::array kQuickClips = {0.84f, 0.88f, 0.90f, 0.94f, 0.96f};
constexpr std::array kFullClips = {0.80f, 0.84f, 0.88f, 0.90f, 0.92f, 0.94f,
                                   0.95f, 0.96f, 0.97f, 0.98f, 0.0f};

bool same_head(const HeadChoice& a, const HeadChoice& b) {
  return a.fit == b.fit && a.head == b.head && a.recipe == b.recipe;
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

std::vector<FitVariant> fit_all(const LayerStatistics& statistics,
                                const std::vector<FitRequest>& wanted, const Rope& rope) {
  std::vector<LayerTransforms> fits = fit_layer_variants(statistics, wanted, rope);
  std::vector<FitVariant> variants;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const FitOptions& options = wanted[i].options;
    variants.push_back({options.kind, options.center, options.granularity, wanted[i].own_basis,
                        std::move(fits[i])});
  }
  return variants;
}

SideVariant variant_of(const FitVariant& fit, Side side, const FitOptions& fixed) {
  const SideTransform& transform = fit.side(side);
  SideVariant variant;
  for (int head = 0; head < transform.forward.count; ++head) {
    variant.push_back({.fit = &transform,
                       .head = head,
                       .recipe = {.clip_ratio = static_cast<float>(
                                      side == Side::kKey ? fixed.clip_k : fixed.clip_v),
                                  .scale_correction = fixed.scale_correction,
                                  .rounding = fixed.rounding}});
  }
  return variant;
}

std::vector<SideVariant> transform_variants(const std::vector<FitVariant>& fits, Side side,
                                            const SideVariant& current, const FitOptions& fixed) {
  std::vector<SideVariant> variants = {current};
  for (size_t i = 1; i < fits.size(); ++i) variants.push_back(variant_of(fits[i], side, fixed));
  return variants;
}

std::vector<SideVariant> clip_variants(const SideVariant& current, const SearchOptions& search) {
  std::vector<SideVariant> variants = {current};
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
    SideVariant variant = current;
    for (HeadChoice& head : variant) head.recipe.clip_ratio = clip;
    variants.push_back(std::move(variant));
  };
  if (search.full) {
    std::for_each(kFullClips.begin(), kFullClips.end(), add);
  } else {
    std::for_each(kQuickClips.begin(), kQuickClips.end(), add);
  }
  return variants;
}

std::vector<SideVariant> writer_variants(const SideVariant& current, const SearchOptions& search) {
  std::vector<SideVariant> variants = {current};
  using enum ScaleCorrection;
  // After shaped rounding `unbiased` is wrong (math 5.3).
  for (const auto& [correction, rounding] : {std::pair{kMetric, Rounding::kShaped},
                                             {kNone, Rounding::kShaped},
                                             {kMetric, Rounding::kPlain},
                                             {kUnbiased, Rounding::kPlain},
                                             {kNone, Rounding::kPlain}}) {
    SideVariant variant = current;
    const RowRecipe& now = current.front().recipe;
    if (!search.rounding && rounding != now.rounding) continue;
    if (!search.scale_correction && correction != now.scale_correction) continue;
    for (HeadChoice& head : variant) {
      head.recipe.scale_correction = correction;
      head.recipe.rounding = rounding;
    }
    if (!same_variant(variant, current)) variants.push_back(std::move(variant));
  }
  return variants;
}

std::vector<int> pick(const LossTable& table, int first, int variants, bool pooled) {
  std::vector<int> picked(static_cast<size_t>(table.heads), 0);
  for (int64_t head = 0; head < table.heads; ++head) {
    double least = 0;
    for (int i = 1; i < variants; ++i) {
      const LossDifference against = compare(table, first + i, first, pooled ? -1 : head);
      if (against.better() && against.difference < least) {
        least = against.difference;
        picked[static_cast<size_t>(head)] = i;
      }
    }
  }
  return picked;
}

SideVariant combine(const std::vector<SideVariant>& variants, const std::vector<int>& picked) {
  SideVariant result;
  for (size_t head = 0; head < picked.size(); ++head) {
    result.push_back(variants[static_cast<size_t>(picked[head])][head]);
  }
  return result;
}

bool same_variant(const SideVariant& a, const SideVariant& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same_head);
}

}  // namespace oscar
