// Collectors of all layers, kept for the whole run.
#include "oscar/calibrate/statistics_pass.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "oscar/base/error.h"

namespace oscar {

// A layer's collector, and copies of its sums at the wanted token counts.
class MomentPass::Layer final : public AttentionObserver {
 public:
  Layer(MomentCollector sums, std::vector<int64_t> marks)
      : sums_(std::move(sums)), marks_(std::move(marks)) {}

  void observe(const AttentionRecord& record) override {
    sums_.observe(record);
    tokens_ += record.k.size(0) * record.k.size(2);
    if (std::find(marks_.begin(), marks_.end(), tokens_) == marks_.end()) return;
    auto copy = std::make_shared<LayerStatistics>(sums_.result());
    copy->o_proj_metric = {};
    snapshots_.push_back(std::move(copy));
  }

  void restore(const LayerStatistics& saved) {
    sums_.add(saved);
    tokens_ += saved.count_kv;
  }
  void restore(std::shared_ptr<const LayerStatistics> snapshot) {
    snapshots_.push_back(std::move(snapshot));
  }

  LayerStatistics result() const { return sums_.result(); }
  const SumSnapshots& snapshots() const { return snapshots_; }

 private:
  MomentCollector sums_;
  std::vector<int64_t> marks_;
  int64_t tokens_ = 0;
  SumSnapshots snapshots_;
};

MomentPass::MomentPass(const Transformer& model, const std::vector<LayerGeometry>& layers,
                       SavePoint save, const std::vector<int64_t>& snapshot_tokens,
                       const std::optional<CacheView>& attended)
    : model_(model), layers_(layers), save_(std::move(save)) {
  const torch::Device device = model.compute().device;
  for (const LayerGeometry& geometry : layers_) {
    if (!geometry.fitted()) {
      collectors_.push_back(nullptr);
      continue;
    }
    std::optional<AttendedCollector> by_attention;
    if (attended && geometry.quantized) {
      by_attention.emplace(geometry, model.config().rope, *attended, device);
    }
    collectors_.push_back(
        std::make_unique<Layer>(MomentCollector(geometry, device, std::move(by_attention)),
                                geometry.quantized ? snapshot_tokens : std::vector<int64_t>()));
  }
}

MomentPass::~MomentPass() = default;

void MomentPass::restore(const std::vector<LayerStatistics>& saved, SumSnapshots snapshots) {
  const auto collector_of = [this](const LayerGeometry& geometry) -> Layer* {
    const auto id = static_cast<size_t>(geometry.layer_id);
    if (id < layers_.size() && geometry == layers_[id]) return collectors_[id].get();
    throw Error({.what = "saved sums have another shape than the model's layer",
                 .where = fmt::format("layer {}", geometry.layer_id),
                 .hint = "delete the checkpoint and start anew"});
  };
  for (const LayerStatistics& layer : saved) {
    Layer* const collector = collector_of(layer.geometry);
    if (collector) collector->restore(layer);
    const bool has_metric = !collector || !layer.o_proj_metric.empty();
    if (has_metric && static_cast<size_t>(layer.geometry.layer_id) == metrics_.size()) {
      metrics_.push_back(layer.o_proj_metric);
    }
  }
  for (auto& copy : snapshots) {
    if (Layer* const collector = collector_of(copy->geometry)) collector->restore(std::move(copy));
  }
}

AttentionObserver* MomentPass::observer(int layer) {
  return collectors_[static_cast<size_t>(layer)].get();
}

void MomentPass::layer_done(const RunPosition& next) {
  if (save_) save_(*this, next);
}

std::vector<LayerStatistics> MomentPass::result() const {
  std::vector<LayerStatistics> statistics;
  for (size_t i = 0; i < collectors_.size(); ++i) {
    const bool local = collectors_[i] == nullptr;
    statistics.push_back(local ? LayerStatistics() : collectors_[i]->result());
    statistics.back().geometry = layers_[i];
    if (i == metrics_.size()) {
      metrics_.push_back(local ? MatrixStack<double>() : model_.o_proj_metric(static_cast<int>(i)));
    }
    statistics.back().o_proj_metric = metrics_[i];
  }
  return statistics;
}

SumSnapshots MomentPass::snapshots() const {
  SumSnapshots all;
  for (const auto& layer : collectors_) {
    if (layer) all.insert(all.end(), layer->snapshots().begin(), layer->snapshots().end());
  }
  return all;
}

void check_counts(const std::vector<LayerStatistics>& statistics, int64_t tokens) {
  for (const LayerStatistics& layer : statistics) {
    if (!layer.geometry.fitted() || layer.count_kv == tokens) continue;
    throw Error({.what = "the sums do not hold every token exactly once",
                 .where = fmt::format("layer {}, count_kv", layer.geometry.layer_id),
                 .expected = std::to_string(tokens),
                 .found = std::to_string(layer.count_kv),
                 .hint = "delete the checkpoint beside the output and start anew"});
  }
}

EnergyPass::EnergyPass(const std::vector<LayerStatistics>& statistics, torch::Device device) {
  for (const LayerStatistics& layer : statistics) {
    if (!layer.geometry.fitted()) {
      collectors_.emplace_back();
      continue;
    }
    MatrixStack<double> covariance = layer.q_moment;
    for (double& entry : covariance.data) entry /= static_cast<double>(layer.count_q);
    collectors_.emplace_back(std::in_place, layer.geometry, covariance, device);
  }
}

AttentionObserver* EnergyPass::observer(int layer) {
  auto& collector = collectors_[static_cast<size_t>(layer)];
  return collector ? &*collector : nullptr;
}

void EnergyPass::store(std::vector<LayerStatistics>& statistics) const {
  for (size_t i = 0; i < statistics.size(); ++i) {
    if (collectors_[i]) statistics[i].v_energy_moment = collectors_[i]->result();
  }
}

}  // namespace oscar
