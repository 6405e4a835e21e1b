// Several ways of fitting one layer, for a choice among them.
#pragma once

#include <vector>

#include "oscar/fit/fit.h"

namespace oscar {

// One way of fitting a layer.
struct FitRequest {
  FitOptions options;
  // Of kind kOscar (math 3.5): U of R = U H P is the eigenbasis of what a side stores (C_K, C_V)
  // instead of what attention weighs (C_Q, C_S). After H all channels then have the same variance,
  // so one scale fits the whole row; what attention weighs is left to shaped rounding. For stacks
  // that serve rotations only: KL of INT2 keys alone is .84 of that with OSCAR's U, standard error
  // .03, both shaped, measured as in balanced_fit.h.
  bool own_basis = false;

  bool operator==(const FitRequest&) const = default;
};

// The fits in the order of `requests`, each equal to fit_layer's where that has the option. A
// thread for each request; eigenvectors that several need are computed once. Throws as fit_layer
// does.
std::vector<LayerTransforms> fit_layer_variants(const LayerStatistics& statistics,
                                                const std::vector<FitRequest>& requests,
                                                const Rope& rope);

}  // namespace oscar
