// Whether what the search half preferred also holds on the confirmation half (math 9.5).
#pragma once

#include <vector>

#include "oscar/search/stages.h"

namespace oscar {

// One side after confirmation, with the reason of each head.
struct ConfirmedSide {
  Candidate candidate;
  Json heads = Json::array();
};
struct ConfirmedSides {
  ConfirmedSide key, value;
};

// Of each head the last stage's winner that beats what was accepted before it, each side with the
// other exact, by more than a paired standard error.
ConfirmedSides confirm_sides(const VariantSearch& variant, const HeldBackHalf& half);

// Both sides INT2: of each head (of the layer when pooled) the given pair, or the default one when
// the given one loses to it; and of a head of which the fallback is better than that, the fallback.
struct SettledPair {
  Candidate key, value;
  std::vector<double> nmse;  // [Hkv]
  Json heads = Json::array();
};
SettledPair settle(const VariantSearch& variant, Candidate key, Candidate value,
                   const HeldBackHalf& half);

}  // namespace oscar
