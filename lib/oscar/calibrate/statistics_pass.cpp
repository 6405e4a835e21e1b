// Collectors of all layers, kept for the whole run.
#include "oscar/calibrate/statistics_pass.h"

#include <fmt/format.h>

#include "oscar/base/error.h"

namespace oscar {

MomentPass::MomentPass(const Transformer& model, const std::vector<LayerGeometry>& layers,
                       SavePoint save)
    : model_(model), layers_(layers), save_(std::move(save)) {
  for (const LayerGeometry& geometry : layers_) {
    collectors_.emplace_back(geometry, model.compute().device);
  }
}

void MomentPass::restore(const std::vector<LayerStatistics>& saved) {
  for (const LayerStatistics& layer : saved) {
    const auto id = static_cast<size_t>(layer.geometry.layer_id);
    if (id >= layers_.size() || !(layer.geometry == layers_[id])) {
      throw Error({.what = "saved sums have another shape than the model's layer",
                   .where = fmt::format("layer {}", layer.geometry.layer_id),
                   .hint = "delete the checkpoint and start anew"});
    }
    collectors_[id].add(layer);
  }
}

AttentionObserver* MomentPass::observer(int layer) {
  return &collectors_[static_cast<size_t>(layer)];
}

void MomentPass::layer_done(const RunPosition& next) { save_(*this, next); }

std::vector<LayerStatistics> MomentPass::result() const {
  std::vector<LayerStatistics> statistics;
  for (size_t i = 0; i < collectors_.size(); ++i) {
    statistics.push_back(collectors_[i].result());
    statistics.back().o_proj_metric = model_.o_proj_metric(static_cast<int>(i));
  }
  return statistics;
}

void check_counts(const std::vector<LayerStatistics>& statistics, int64_t tokens) {
  for (const LayerStatistics& layer : statistics) {
    if (layer.count_kv == tokens) continue;
    throw Error({.what = "the sums do not hold every token exactly once",
                 .where = fmt::format("layer {}, count_kv", layer.geometry.layer_id),
                 .expected = std::to_string(tokens),
                 .found = std::to_string(layer.count_kv),
                 .hint = "delete the checkpoint beside the output and start anew"});
  }
}

EnergyPass::EnergyPass(const std::vector<LayerStatistics>& statistics, torch::Device device) {
  for (const LayerStatistics& layer : statistics) {
    MatrixStack<double> covariance = layer.q_moment;
    for (double& entry : covariance.data) entry /= static_cast<double>(layer.count_q);
    collectors_.emplace_back(layer.geometry, covariance, device);
  }
}

AttentionObserver* EnergyPass::observer(int layer) {
  return &collectors_[static_cast<size_t>(layer)];
}

void EnergyPass::store(std::vector<LayerStatistics>& statistics) const {
  for (size_t i = 0; i < statistics.size(); ++i) {
    statistics[i].v_energy_moment = collectors_[i].result();
  }
}

}  // namespace oscar
