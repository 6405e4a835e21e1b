// One pair of clipping ratios for a whole model, from the losses that were recorded layer by layer.
#pragma once

#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/fit/search_options.h"

namespace oscar {

struct ClipPair {
  double key = kPublishedClipK, value = kPublishedClipV;  // 0 = off
};

struct PooledClip {
  ClipPair pair;
  // Loss with `pair` over the loss with the ratios that each layer has, each side alone INT2,
  // summed over both and over layers. NaN: not recorded, and `pair` is the published one.
  double loss_factor = 1;
};

// `layers`: quantized layers whose search of ratios began at the published pair. The pair is that
// of least loss among the ratios that every layer was tried with (SCHEMA.md: the first stage `clip`
// of each side); `equal`: among pairs of equal ratios. Losses count as shares of each head's
// energy.
PooledClip pool_clips(const std::vector<const LayerTransforms*>& layers, bool equal);

// Gives the bundle's own layers as few ratios as `scope` has, each pooled over what shares it, and
// multiplies predicted_output_nmse by what that costs. Returns what to record (SCHEMA.md,
// `pooled_clip`); null for ClipScope::kHead.
Json pool_own_clips(Bundle& bundle, ClipScope scope);

}  // namespace oscar
