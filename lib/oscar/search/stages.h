// What each stage of the search compares, and how one candidate is picked (math 9.4).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/fit/search_options.h"
#include "oscar/search/losses.h"

namespace oscar {

// The fixed fit first, then every other one that `search` allows, each with metrics and with
// feedback factors where rows may be shaped. Of centring, row weights and granularity at most one
// differs from the fixed fit's.
std::vector<FitRequest> fit_requests(const FitOptions& fixed, const SearchOptions& search);

// What a stage picked of its candidates, the one that it began with when none was better.
struct StageWinner {
  std::string stage;
  Candidate candidate;
};

// One side on its way through the stages.
struct SideSearch {
  Side side;
  Candidate fixed = {};  // the default, which ties go to
  std::vector<StageWinner> winners = {};
  Json compared = Json::array();               // `stages` of the record (bundle/SCHEMA.md)
  std::optional<ClipLosses> clip_losses = {};  // of the first comparison of ratios

  // What stands after the first `stages` of the stages; 0: the default.
  const Candidate& after(size_t stages) const {
    return stages == 0 ? fixed : winners[stages - 1].candidate;
  }
  const Candidate& current() const { return after(winners.size()); }
};

// The search of one variant of a layer.
struct VariantSearch {
  FitOptions fixed;
  SearchOptions search;
  bool pooled = false;  // one candidate for all heads of the layer
  std::vector<SearchFit> fits;
  const SearchFit* fallback = nullptr;  // not among the fits; null: none
  SideSearch key{.side = Side::kKey};
  SideSearch value{.side = Side::kValue};
};

// Every stage that `search` asks for, on the search half:
//   transform: kind, centring, row weights, granularity, at the fixed clipping ratios and writer
//   clip:      each side with the other exact, then once more with the other side INT2 (not when
//              pooled)
//   writer:    scale correction and rounding
// A stage begins with what the one before picked, and keeps it unless another candidate is better
// by more than one paired standard error; of those the one of least loss is picked, of each KV
// head (of the layer when pooled). Throws Interrupted between stages when a stop was requested.
void run_stages(VariantSearch& variant, const HeldBackHalf& half);

}  // namespace oscar
