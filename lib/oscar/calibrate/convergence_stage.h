// Whether the collected text was enough, from copies of each layer's sums taken on the way; and how
// these copies lie in a checkpoint.
#pragma once

#include <vector>

#include "oscar/base/json.h"
#include "oscar/base/progress.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/calibrate/statistics_pass.h"
#include "oscar/executor/run_plan.h"

namespace oscar {

// convergence_record (fit/convergence.h) of all quantized layers. `snapshots` were taken at
// plan.snapshot_tokens, `statistics` are the complete sums of all layers. Of `options` centering
// and positions count.
Json judge_convergence(const SumSnapshots& snapshots,
                       const std::vector<LayerStatistics>& statistics, const RunPlan& plan,
                       const FitOptions& options, const Rope& rope, Progress& progress);

// One copy as a tensor named by its number within the layer and the layer: f64, the sums of
// visit_sums (fit/statistics.h), count_q, count_kv.
std::vector<ResumeTensor> save_snapshots(const SumSnapshots& snapshots);

// The copies among `tensors`. Throws Error naming `file` unless each layer of `statistics` that has
// passed an entry of plan.snapshot_tokens has exactly that copy.
SumSnapshots load_snapshots(const std::vector<ResumeTensor>& tensors,
                            const std::vector<LayerStatistics>& statistics, const RunPlan& plan,
                            const std::string& file);

}  // namespace oscar
