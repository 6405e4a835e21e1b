// The table of key centres that writers and readers use, from what a bundle holds of them.
#pragma once

#include <vector>

#include "oscar/fit/fit.h"

namespace oscar {

// [segments, Hkv, 2, d] KeyCentres::rows in float32, rounded to bf16 (math 4.9): centre j of
// segment s is (c_j R - mean) forward, R the rotation to the segment's middle. Zeros for heads
// without centres. There are segments for all rope.max_positions.
std::vector<float> centre_rows(const SideTransform& keys, const Rope& rope);

}  // namespace oscar
