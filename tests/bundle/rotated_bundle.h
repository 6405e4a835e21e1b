// A small bundle of rotations that differ by layer, side and head, for the tests of exchange.
#pragma once

#include <cstdint>

#include "bundle/plain_bundle.h"
#include "oscar/bundle/bundle.h"

namespace oscar::plain {

// Orthogonal, far from symmetric.
MatrixF random_rotation(int d, uint64_t seed);
void rotate(SideTransform& side, uint64_t seed, bool shared);

// Two layers in the codec of SGLang, one rotation a layer and side or one a head.
Bundle rotated_bundle(bool shared);

}  // namespace oscar::plain
