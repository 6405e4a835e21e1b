// Whether the collected text was enough, from copies of each layer's sums taken on the way.
#pragma once

#include <vector>

#include "oscar/base/json.h"
#include "oscar/base/progress.h"
#include "oscar/calibrate/statistics_pass.h"
#include "oscar/executor/run_plan.h"

namespace oscar {

// convergence_record (fit/convergence.h) of all quantized layers. `snapshots` were taken at
// plan.snapshot_tokens, `statistics` are the complete sums of all layers. Of `options` centering
// and positions count. `may_stop`: throws Interrupted when a stop was requested.
Json judge_convergence(const SumSnapshots& snapshots,
                       const std::vector<LayerStatistics>& statistics, const RunPlan& plan,
                       const FitOptions& options, const Rope& rope, bool may_stop,
                       Progress& progress);

}  // namespace oscar
