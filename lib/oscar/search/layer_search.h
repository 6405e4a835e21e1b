// Chooses one layer's transforms, clipping and writer by attention-output error on held-back text.
#pragma once

#include "oscar/bundle/bundle.h"
#include "oscar/search/search_stages.h"

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
  uint64_t seed = 0;
  torch::Tensor output_metric;  // [Hq, d_v, d_v], W_O,j W_O,j^T, float32 on the computing device
};

struct LayerChoice {
  LayerTransforms layer;  // with predicted_output_nmse from the confirmation half, and `search`
  PortableLayer portable;
};

// Stages, each with the choices of those before (all per KV head; losses are attention-output
// errors, see variant_losses.h):
//   transform: kind, centering, granularity, at the fixed clipping ratios
//   clip:      each side with the other exact, then once more with the other side INT2 (not for the
//              portable variants)
//   writer:    scale correction and rounding
// A stage leaves the default unless another variant is better by more than one paired standard
// error. On other queries, a larger sample of the confirmation half, each stage's outcome must
// again beat what was accepted before it by more than that; and on every query of that half the
// final pair of sides must not lose to the default pair. Otherwise the default stays. The portable
// variants are confirmed on the sample. Throws Interrupted between stages when a stop was
// requested.
LayerChoice search_layer(const LayerSearchTask& task, const HeldBackLayer& held_back);

// Every fit that search_layer looks at, to be made beforehand.
struct LayerFits {
  std::vector<FitVariant> searched, portable_shared, portable_per_head;
};
LayerFits fit_for_search(const LayerStatistics& statistics, const FitOptions& fixed,
                         const SearchOptions& search, const Rope& rope);
LayerChoice search_layer(const LayerSearchTask& task, LayerFits fits,
                         const HeldBackLayer& held_back);

// Without held-back text: the fixed options, and the portable variant with the published clipping
// ratios. predicted_output_nmse stays NaN.
LayerChoice fit_without_search(const LayerStatistics& statistics, const FitOptions& fixed,
                               const Rope& rope);

}  // namespace oscar
