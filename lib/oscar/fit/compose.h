// A side's transform put together from the heads of several fits.
#pragma once

#include <vector>

#include "oscar/fit/fit.h"

namespace oscar {

// One head of a fit, and how its rows are to be written.
struct FittedHead {
  const SideTransform* fit = nullptr;  // with metric and feedback of every head
  int head = 0;                        // of that fit
  RowRecipe recipe = {};
};

// Heads in the given order, as many as are given: also more than a layer has, to run several ways
// of writing a side next to each other. Partners, metrics and feedback factors are stored when a
// head needs them; a head of plain rounding then has the identity for its factor.
SideTransform compose_heads(const std::vector<FittedHead>& heads, Side side);

}  // namespace oscar
