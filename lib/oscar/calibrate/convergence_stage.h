// Whether the collected text was enough, from copies of each layer's sums taken on the way; and how
// copies of sums lie in a checkpoint.
#pragma once

#include <functional>
#include <string>
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

inline constexpr const char* kSnapshot = "snapshot";
inline constexpr const char* kBlocksBefore = "before";

// The name of a layer's copy number `index`.
std::string copy_name(const char* kind, size_t index, int layer);

// Adds one tensor a copy, of that name: f64, the sums of visit_sums (fit/statistics.h), count_q,
// count_kv.
void save_copies(const char* kind, const SumSnapshots& copies, std::vector<ResumeTensor>& tensors);

// The copies of a kind among `tensors`: `wanted` says of how many tokens a layer of `statistics`
// must have them. Throws Error naming `file` where one is missing or of other tokens.
using WantedCopies = std::function<std::vector<int64_t>(const LayerGeometry&)>;
SumSnapshots load_copies(const char* kind, const std::vector<ResumeTensor>& tensors,
                         const std::vector<LayerStatistics>& statistics, const WantedCopies& wanted,
                         const std::string& file);

}  // namespace oscar
