// Layers side by side.
#include "oscar/calibrate/convergence_stage.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "oscar/base/interrupt.h"
#include "oscar/base/parallel.h"
#include "oscar/fit/convergence.h"
#include "oscar/fit/fitted_layers.h"

namespace oscar {

Json judge_convergence(const SumSnapshots& snapshots,
                       const std::vector<LayerStatistics>& statistics, const RunPlan& plan,
                       const FitOptions& options, const Rope& rope, bool may_stop,
                       Progress& progress) {
  const LayerStatistics& any = first_fitted(statistics, "the model");
  std::vector<int64_t> parts = plan.snapshot_tokens;
  parts.push_back(any.count_kv);
  const std::string problem =
      convergence_problem(parts, std::max(any.geometry.head_dim_k, any.geometry.head_dim_v));
  std::vector<LayerConvergence> layers;
  if (!problem.empty()) return convergence_record(layers, any.count_kv, problem);
  std::map<int, std::vector<const LayerStatistics*>> by_layer;
  for (const auto& copy : snapshots) by_layer[copy->geometry.layer_id].push_back(copy.get());
  std::vector<const LayerStatistics*> judged;
  for (const LayerStatistics& total : statistics) {
    if (total.geometry.quantized) judged.push_back(&total);
  }
  layers.resize(judged.size());
  progress.begin("judging the text", static_cast<int64_t>(judged.size()), "layers");
  std::mutex advancing;
  parallel_for(static_cast<int64_t>(judged.size()), [&](int64_t index) {
    if (may_stop) stop_if_requested();
    const auto layer = static_cast<size_t>(index);
    const auto& copies = by_layer.at(judged[layer]->geometry.layer_id);
    layers[layer] = layer_convergence(copies, *judged[layer], options, rope);
    const std::lock_guard<std::mutex> lock(advancing);
    progress.advance(1);
  });
  progress.end();
  return convergence_record(layers, any.count_kv, "no layer is quantized");
}

}  // namespace oscar
