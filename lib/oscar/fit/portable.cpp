// Published values, and the fit with them.
#include "oscar/fit/portable.h"

#include "oscar/fit/presets.h"

namespace oscar {

FitOptions portable_options(const FitOptions& fixed, Granularity granularity) {
  return {.kind = TransformKind::kOscar,
          .objective_v = fixed.objective_v,
          .granularity = granularity,
          .row_weights = fixed.row_weights,
          .center = false,
          .rounding = Rounding::kPlain,
          .scale_correction = ScaleCorrection::kNone,
          .clip_k = kPublishedClipK,
          .clip_v = kPublishedClipV,
          .position_span = fixed.position_span};
}

LayerTransforms fit_portable(const LayerStatistics& statistics, const FitOptions& fixed,
                             Granularity granularity, const Rope& rope) {
  LayerTransforms layer = fit_layer(statistics, portable_options(fixed, granularity), rope);
  layer.warnings.clear();
  return layer;
}

}  // namespace oscar
