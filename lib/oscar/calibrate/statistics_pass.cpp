// Collectors of all layers, kept for the whole run.
#include "oscar/calibrate/statistics_pass.h"

namespace oscar {

MomentPass::MomentPass(const Transformer& model, const std::vector<LayerGeometry>& layers,
                       SavePoint save)
    : model_(model), save_(std::move(save)) {
  for (const LayerGeometry& geometry : layers) {
    collectors_.emplace_back(geometry, model.compute().device);
  }
}

void MomentPass::restore(const std::vector<LayerStatistics>& saved) {
  for (size_t i = 0; i < saved.size(); ++i) collectors_[i].add(saved[i]);
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
