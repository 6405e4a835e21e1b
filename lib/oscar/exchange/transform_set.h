// Transforms between a bundle and the files of other tools, the concern of this folder. Here: the
// form that both sides share. formats.h lists the files, export.h writes them, verify_export.h
// reads them back under the rules of their stack, import.h makes a bundle of them.
#pragma once

#include <map>
#include <vector>

#include "oscar/fit/fit.h"

namespace oscar {

// By global layer id, in the bundle's orientation: rows x' = (x - mean) forward. Of a side only
// what the file holds is there: `forward` [heads, d, d] with heads 1 where all KV heads share it,
// and where they were given `partner`, `mean`, `eigenvalues`, `metric`, `feedback`, `centres` and
// the recipe's clip_ratio and scale_correction, for as many heads.
using TransformSet = std::map<int, LayerTransforms>;

// Side by side, for tables of keys and values.
inline SideTransform& side_of(LayerTransforms& layer, Side side) {
  return side == Side::kKey ? layer.key : layer.value;
}

// Those of a bundle's layers, each with its first head alone where `shared`.
TransformSet transform_set(const std::vector<const LayerTransforms*>& layers, bool shared);

}  // namespace oscar
