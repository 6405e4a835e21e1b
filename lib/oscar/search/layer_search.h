// The search of one layer: its transforms, clipping and writer are decided by attention-output
// error on held-back text. The words of this folder:
//   held back  chunks of the corpus that no fit sees until all is decided, in two halves: one to
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
// From a chunk to a decision: held_back, pass, layer_search; stages and confirm compare candidates
// by losses; memory says what all of it may take.
#pragma once

#include "oscar/bundle/bundle.h"
#include "oscar/search/stages.h"

namespace oscar {

// What a layer's attention saw of the held-back chunks.
struct HeldBackLayer {
  std::vector<HeldChunk> search, confirm;
};

struct LayerSearchTask {
  const LayerStatistics& statistics;  // of the chunks that the fit may see
  const FitOptions& fixed;            // what is not searched, and what ties go to
  const SearchOptions& search;
  const Rope& rope;
  const QuantizerSettings& quantizer;
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

// The stages (stages.h) of each variant on the search half, all per KV head. On other queries, a
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

}  // namespace oscar
