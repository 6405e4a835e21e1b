// Choosing for a layer, in stages, and confirming it on other text (math 9).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"
#include "oscar/calibrate/search/losses.h"
#include "oscar/fit/fit.h"

namespace oscar {

// What each stage of the search compares, and how one candidate is picked (math 9.4).

// The fixed fit first, then every other one that `search` allows, each with metrics and with
// feedback factors where rows may be shaped. Of centering, row weights and granularity at most one
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
//   transform: kind, centering, row weights, granularity, at the fixed clipping ratios and writer
//   clip:      each side with the other exact, then once more with the other side INT2 (not when
//              pooled)
//   writer:    scale correction and rounding
// A stage begins with what the one before picked, and keeps it unless another candidate is better
// by more than one paired standard error; of those the one of least loss is picked, of each KV
// head (of the layer when pooled). Throws Interrupted between stages when a stop was requested.
void run_stages(VariantSearch& variant, const HeldBackHalf& half);

// The search of one layer: its transforms, clipping and writer are decided by attention-output
// error on held-back text. The words of this folder:
//   held back  sequences of the corpus that no fit sees until all is decided, in two halves: one to
//              search, one to confirm
//   fit        one way of fitting a layer: the transforms of both sides
//   candidate  one way of writing a side: of each KV head a fit and a row recipe (clip, writer)
//   pair       a key candidate with a value candidate, or with exact rows
//   block      a run of neighbouring queries; the spread over blocks is a loss's standard error
//   default    the candidate of the fixed options, which ties go to
//   fallback   Hadamard with the published clipping, which the main variant must not be worse than
//   stage      one comparison of candidates in the search half: transform, clip, writer. What it
//              picks is its winner, with which the next stage begins
//   confirm    to accept a winner only if it is better in the confirmation half too
//   variant    one of the three forms of a layer in a bundle, each searched for itself: the main
//              one, and the portable one with a rotation for the layer or for each KV head
//   decision   what a layer ends with: its variants
// From a sequence to a decision: pass.cpp sees the held-back rows and says what memory they take,
// search.cpp holds the stages and confirms, candidates.cpp and losses.cpp compare.

// What a layer's attention saw of the held-back sequences.
struct HeldBackLayer {
  std::vector<HeldSequence> search, confirm;
};

struct LayerSearchTask {
  const LayerStatistics& statistics;  // of the sequences that the fit may see
  const FitOptions& fixed;            // what is not searched, and what ties go to
  const SearchOptions& search;
  const Rope& rope;
  const CacheFormat& quantizer;
  double sm_scale = 1;  // factor on the scores before softmax
  uint64_t seed = 0;
  torch::Tensor output_metric;  // [Hq, d_v, d_v], W_O,j W_O,j^T, float32 on the computing device
};

// What a KV head of a side is made of.
struct HeadChoice {
  FitRequest fit;
  RowRecipe recipe;
};
struct VariantChoice {
  std::vector<HeadChoice> key, value;  // [Hkv]
};

struct LayerDecision {
  LayerTransforms main;  // with predicted_output_nmse from the confirmation half, and `search`
  PortableLayer portable;
  // Of main, portable.shared and portable.per_head; empty where nothing was searched.
  std::vector<VariantChoice> choices = {};
};

// Every fit that search_layer looks at, to be made beforehand.
struct VariantFits {
  std::vector<SearchFit> main, portable_shared, portable_per_head;
};
VariantFits fit_for_search(const LayerStatistics& statistics, const FitOptions& fixed,
                           const SearchOptions& search, const Rope& rope);

// The stages of each variant on the search half, all per KV head. On other queries, a
// larger sample of the confirmation half, each stage's winner must again beat what was accepted
// before it by more than a paired standard error; and on every query of that half the final pair
// must not lose to the default pair. Otherwise the default stays. Where search.fallback asks for
// it, a head of which the fallback is better than that by more than a standard error gets the
// fallback. The portable variants are confirmed on the sample. Throws Interrupted between stages
// when a stop was requested.
LayerDecision search_layer(const LayerSearchTask& task, VariantFits fits,
                           const HeldBackLayer& held_back);
LayerDecision search_layer(const LayerSearchTask& task, const HeldBackLayer& held_back);

// The decision with its transforms made anew, of `statistics`: those that the fits were made of and
// those of the held-back text. What was chosen, what was measured and the record of both stay.
LayerDecision fit_again(LayerDecision decision, const LayerStatistics& statistics,
                        const FitOptions& fixed, const Rope& rope);

// Without held-back text: the fixed options, and the portable variant with the published clipping
// ratios. predicted_output_nmse stays NaN. Of a local layer there is nothing but its geometry.
LayerDecision fit_without_search(const LayerStatistics& statistics, const FitOptions& fixed,
                                 const Rope& rope);

// A searched layer's decision on its way between processes of one version.

// What was chosen, measured, recorded and warned of, to the bit; not the transforms, which
// fit_again makes of what was chosen.
std::vector<uint8_t> decision_bytes(const LayerDecision& decision);

// The decision, of a layer of this geometry, with transforms that fit_again must make. Throws Error
// for bytes that are no such decision.
LayerDecision decision_from_bytes(const std::vector<uint8_t>& bytes, const LayerGeometry& geometry);

// Whether what the search half preferred also holds on the confirmation half (math 9.5).

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
