// The variants that each stage of the search compares, and how one is picked.
#pragma once

#include "oscar/fit/layer_fits.h"
#include "oscar/fit/search_options.h"
#include "oscar/search/variant_losses.h"

namespace oscar {

// One way of fitting a layer; `fit` holds both sides with metrics and feedback factors.
struct FitVariant {
  TransformKind kind;
  bool center;
  Granularity granularity;
  bool own_basis;  // layer_fits.h
  LayerTransforms fit;

  const SideTransform& side(Side which) const { return side_of(fit, which); }
};

// The fixed fit first, then every other one that `search` allows, each with metrics and with
// feedback factors where rows may be shaped. Of those that differ from the fixed one in centring
// and in granularity none is tried.
std::vector<FitRequest> fit_requests(const FitOptions& fixed, const SearchOptions& search);

// One fit for each of `wanted`.
std::vector<FitVariant> fit_all(const LayerStatistics& statistics,
                                const std::vector<FitRequest>& wanted, const Rope& rope);

// All heads of a fit with the fixed clipping ratio and writer.
SideVariant variant_of(const FitVariant& fit, Side side, const FitOptions& fixed);

// Variants of the stages; the first is always `current`.
std::vector<SideVariant> transform_variants(const std::vector<FitVariant>& fits, Side side,
                                            const SideVariant& current, const FitOptions& fixed);
std::vector<SideVariant> clip_variants(const SideVariant& current, const SearchOptions& search);
std::vector<SideVariant> writer_variants(const SideVariant& current, const SearchOptions& search);

// Pairing `first + i` of `table` is variant i. Of each head the variant of least loss among those
// that beat variant 0 by more than a paired standard error, else variant 0. `pooled`: one variant
// for all heads, by the sum of their losses.
std::vector<int> pick(const LossTable& table, int first, int variants, bool pooled);

// Head h from variants[picked[h]].
SideVariant combine(const std::vector<SideVariant>& variants, const std::vector<int>& picked);

// Whether two variants are the same for every head.
bool same_variant(const SideVariant& a, const SideVariant& b);

}  // namespace oscar
