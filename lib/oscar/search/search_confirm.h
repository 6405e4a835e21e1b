// Whether what the search half preferred also holds on the confirmation half.
#pragma once

#include <vector>

#include "oscar/search/search_candidate.h"

namespace oscar {

// One side's outcome after confirmation, with the reason of each head.
struct ConfirmedSide {
  SideVariant variant;
  Json heads = Json::array();
};
struct ConfirmedSides {
  ConfirmedSide key, value;
};

// Of each head the last stage's outcome that beats what was accepted before it, each side with the
// other exact, by more than a paired standard error.
ConfirmedSides confirm_sides(const Candidate& candidate, const HeldBackHalf& half);

// Both sides INT2: of each head (of the layer when pooled) the given pair, or the default one when
// the given one loses to it.
struct FinalPair {
  SideVariant key, value;
  std::vector<double> nmse;  // [Hkv]
  Json heads = Json::array();
};
FinalPair settle(const Candidate& candidate, SideVariant key, SideVariant value,
                 const HeldBackHalf& half);

}  // namespace oscar
