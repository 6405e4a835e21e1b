// One pair of clipping ratios for a whole model, from the losses that were measured layer by layer.
#pragma once

#include <optional>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"
#include "oscar/fit/search_options.h"

namespace oscar {

struct ClipPair {
  double key = kPublishedClipK, value = kPublishedClipV;  // 0 = off

  bool operator==(const ClipPair&) const = default;
};

struct PooledClips {
  ClipPair pair;
  // Loss with `pair` over the loss with the ratios that each layer has, each side alone INT2,
  // summed over both and over layers. Absent: the layers keep no losses of their ratios, or of no
  // ratio that all were tried with, and `pair` is the published one.
  std::optional<double> loss_factor = 1.0;
};

// The pair that all `layers` have, else that of least loss among the ratios that every layer was
// tried with, by ClipLosses (math 9.6); ties go to what the search began with. `one_ratio`: among
// pairs of equal ratios. Layers that are not quantized have no place in the list.
PooledClips pool_clips(const std::vector<const LayerTransforms*>& layers, bool one_ratio);

// Successive quantized layers that share their ratios.
struct ClipShare {
  int first_layer = 0;
  size_t layers = 0;
  PooledClips clips;
};

// Gives the bundle's own layers as few ratios as `scope` has, each pooled over what shares it, and
// multiplies predicted_output_nmse by what that costs (NaN, not measured, when that is not known).
// Nothing for ClipScope::kHead.
std::vector<ClipShare> pool_own_clips(Bundle& bundle, ClipScope scope);

// What the bundle records of them (bundle/SCHEMA.md, `pooled_clip`).
Json pooled_clip_record(const std::vector<ClipShare>& shares);

}  // namespace oscar
