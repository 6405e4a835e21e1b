// A small bundle of plain rows, with losses of clipping ratios, for the tests of backends.
#pragma once

#include <utility>
#include <vector>

#include "oscar/bundle/bundle.h"

namespace oscar::plain {

inline constexpr int kHeadDim = 64, kHeads = 2;

// The same losses for each head.
ClipLosses clip_losses(const std::vector<std::pair<float, double>>& tried);

// Two layers, everything plain; the portable layers prefer other keys' ratios each.
Bundle plain_bundle();

}  // namespace oscar::plain
