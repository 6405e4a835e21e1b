// A searched layer's decision on its way between processes of one version.
#pragma once

#include <cstdint>
#include <vector>

#include "oscar/search/layer_search.h"

namespace oscar {

// What was chosen, measured, recorded and warned of, to the bit; not the transforms, which
// fit_again makes of what was chosen.
std::vector<uint8_t> decision_bytes(const LayerDecision& decision);

// The decision, of a layer of this geometry, with transforms that fit_again must make. Throws Error
// for bytes that are no such decision.
LayerDecision decision_from_bytes(const std::vector<uint8_t>& bytes, const LayerGeometry& geometry);

}  // namespace oscar
