// One recipe with everything that is searched on it, and the stages that search it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/search/search_stages.h"

namespace oscar {

// One side of what is being decided: the outcome of each stage so far, the default first.
struct SideState {
  Side side;
  std::vector<SideVariant> outcomes;
  std::vector<std::string> stages;  // of outcomes but the first
  Json compared = Json::array();
  std::optional<ClipLosses> clip_losses = {};  // of the first comparison of ratios

  const SideVariant& current() const { return outcomes.back(); }
};

// A fit with everything that is searched on it.
struct Candidate {
  FitOptions fixed;
  SearchOptions search;
  bool pooled = false;  // one choice for all heads of the layer
  std::vector<FitVariant> fits;
  SideState key{.side = Side::kKey, .outcomes = {}, .stages = {}};
  SideState value{.side = Side::kValue, .outcomes = {}, .stages = {}};
};

// Every stage that `search` asks for, on the search half; outcomes and what was compared go into
// the two sides. Throws Interrupted between stages when a stop was requested.
void run_stages(Candidate& candidate, const HeldBackHalf& half);

// Each variant with the other side exact: keys first, then values.
std::vector<Pairing> one_side_each(size_t keys, size_t values);

}  // namespace oscar
