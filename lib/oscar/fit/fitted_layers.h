// Lists with an entry for every layer of a model, of which local ones are empty.
#pragma once

#include <algorithm>
#include <string>

#include "oscar/base/error.h"
#include "oscar/fit/fit.h"

namespace oscar {

// The first layer with statistics and transforms, of `layers` with a `geometry`. Throws Error,
// naming `where`, when there is none.
template <typename Layers>
const auto& first_fitted(const Layers& layers, const std::string& where) {
  const auto found =
      std::ranges::find_if(layers, [](const auto& layer) { return layer.geometry.fitted(); });
  if (found == layers.end()) {
    throw Error({.what = "no layer has statistics or transforms", .where = where});
  }
  return *found;
}

// The entry of a local layer among transforms.
inline LayerTransforms without_transforms(const LayerGeometry& geometry) {
  LayerTransforms layer;
  layer.geometry = geometry;
  return layer;
}

}  // namespace oscar
