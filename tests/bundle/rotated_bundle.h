// A small bundle of rotations that differ by layer, side and head, for the tests of exchange.
#pragma once

#include "oscar/bundle/bundle.h"

namespace oscar::plain {

// Two layers in the codec of SGLang, one rotation a layer and side or one a head.
Bundle rotated_bundle(bool shared);

}  // namespace oscar::plain
