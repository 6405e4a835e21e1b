// Several ways of fitting one layer, for a choice among them.
#pragma once

#include <vector>

#include "oscar/fit/fit.h"

namespace oscar {

// own_basis, of kind kOscar: each side is turned into the eigenbasis of what it stores (C_K, C_V)
// instead of what attention asks for (C_Q, C_S), with the same H and P after it. Every channel then
// varies alike, so that one scale a row fits all of them, and shaped rounding with the metric takes
// care of what attention asks for. Where only rotations are served this loses
// least (as in balanced_fit.h: KL of INT2 keys alone .84, standard error .03, of that with OSCAR's
// rotation, both shaped).
struct FitRequest {
  FitOptions options;
  bool own_basis = false;
};

// One fit for each request, as fit_layer makes it; side by side on as many threads, with what they
// have in common computed once. Throws as fit_layer does.
std::vector<LayerTransforms> fit_layer_variants(const LayerStatistics& statistics,
                                                const std::vector<FitRequest>& requests,
                                                const Rope& rope);

}  // namespace oscar
