// The recipe of transforms that every server can run, whatever else is fitted.
#pragma once

#include "oscar/fit/fit.h"

namespace oscar {

// OSCAR's rotation with a plain writer, uncentred, clipping ratios as published; objective and
// positions as in `fixed`.
FitOptions portable_options(const FitOptions& fixed, Granularity granularity);

// That fit of one layer; its warnings are those of the layer's main fit and are left out.
LayerTransforms fit_portable(const LayerStatistics& statistics, const FitOptions& fixed,
                             Granularity granularity, const Rope& rope);

}  // namespace oscar
