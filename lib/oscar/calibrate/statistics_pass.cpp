// Collectors of all layers, kept for the whole run.
#include "oscar/calibrate/statistics_pass.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/parallel.h"
#include "oscar/model/side_stream.h"

namespace oscar {
namespace {

bool is_one_of(const std::vector<int64_t>& marks, int64_t tokens) {
  return std::find(marks.begin(), marks.end(), tokens) != marks.end();
}

}  // namespace

// A layer's collector, the sums of the blocks before, and copies of all at the wanted token counts.
class MomentPass::Layer final : public AttentionObserver {
 public:
  // `before` begins at zero; none where `marks` has no blocks.
  Layer(MomentCollector block, std::optional<MomentCollector> before, SumMarks marks)
      : block_(std::move(block)), before_(std::move(before)), marks_(std::move(marks)) {}

  void observe(const AttentionRecord& record) override {
    block_.observe(record);
    tokens_ += record.k.size(0) * record.k.size(2);
    if (!is_one_of(marks_.block_tokens, tokens_)) return;
    before_->add(block_);
    block_.clear();
    copy_at_mark();
  }

  void restore_before(const LayerStatistics& saved) {
    before_->add(saved);
    tokens_ += saved.count_kv;
  }
  void restore_block(const LayerStatistics& saved) {
    if (is_one_of(marks_.block_tokens, saved.count_kv) && tokens_before() == 0) {
      return restore_before(saved);
    }
    block_.add(saved);
    tokens_ += saved.count_kv;
  }
  void restore_snapshot(std::shared_ptr<const LayerStatistics> snapshot) {
    snapshots_.push_back(std::move(snapshot));
  }

  LayerStatistics result() const {
    if (tokens_before() == 0) return sums_of(block_);
    LayerStatistics sum = sums_of(*before_);
    if (tokens_before() < tokens_) add_statistics(sum, sums_of(block_));
    return sum;
  }
  LayerStatistics block() const {
    const bool at_end = tokens_before() > 0 && tokens_before() == tokens_;
    return sums_of(at_end ? *before_ : block_);
  }
  const SumSnapshots& snapshots() const { return snapshots_; }
  // Null where block() is everything.
  std::shared_ptr<const LayerStatistics> before() const {
    if (tokens_before() == 0 || tokens_before() == tokens_) return nullptr;
    return std::make_shared<const LayerStatistics>(sums_of(*before_));
  }

 private:
  static LayerStatistics sums_of(const MomentCollector& collector) {
    LayerStatistics sums = collector.result();
    sums.o_proj_metric = {};
    return sums;
  }
  int64_t tokens_before() const { return before_ ? before_->count_kv() : 0; }
  void copy_at_mark() {
    if (!is_one_of(marks_.snapshot_tokens, tokens_)) return;
    snapshots_.push_back(std::make_shared<const LayerStatistics>(sums_of(*before_)));
  }

  MomentCollector block_;
  std::optional<MomentCollector> before_;
  SumMarks marks_;
  int64_t tokens_ = 0;
  SumSnapshots snapshots_;
};

MomentPass::MomentPass(const Transformer& model, const std::vector<LayerGeometry>& layers,
                       SavePoint save, const SumMarks& marks,
                       const std::optional<CacheView>& attended)
    : model_(model), layers_(layers), save_(std::move(save)) {
  const torch::Device device = model.compute().device;
  for (const LayerGeometry& geometry : layers_) {
    if (!geometry.fitted()) {
      collectors_.push_back(nullptr);
      continue;
    }
    const auto collector = [&] {
      std::optional<AttendedCollector> by_attention;
      if (attended && geometry.quantized) {
        by_attention.emplace(geometry, model.config().rope, *attended, device);
      }
      return MomentCollector(geometry, device, std::move(by_attention));
    };
    SumMarks own = marks;
    if (!geometry.quantized) own.snapshot_tokens.clear();
    std::optional<MomentCollector> before;
    if (!own.block_tokens.empty()) before.emplace(collector());
    collectors_.push_back(std::make_unique<Layer>(collector(), std::move(before), std::move(own)));
  }
}

MomentPass::~MomentPass() = default;

void MomentPass::restore(const std::vector<LayerStatistics>& block, const SumSnapshots& before,
                         SumSnapshots snapshots) {
  const auto collector_of = [this](const LayerGeometry& geometry) -> Layer* {
    const auto id = static_cast<size_t>(geometry.layer_id);
    if (id < layers_.size() && geometry == layers_[id]) return collectors_[id].get();
    throw Error({.what = "saved sums have another shape than the model's layer",
                 .where = fmt::format("layer {}", geometry.layer_id),
                 .hint = "delete the checkpoint and start anew"});
  };
  for (const auto& layer : before) {
    if (Layer* const collector = collector_of(layer->geometry)) collector->restore_before(*layer);
  }
  for (const LayerStatistics& layer : block) {
    Layer* const collector = collector_of(layer.geometry);
    if (collector) collector->restore_block(layer);
    const bool has_metric = !collector || !layer.o_proj_metric.empty();
    if (has_metric && static_cast<size_t>(layer.geometry.layer_id) == metrics_.size()) {
      metrics_.push_back(layer.o_proj_metric);
    }
  }
  for (auto& copy : snapshots) {
    if (Layer* const collector = collector_of(copy->geometry)) {
      collector->restore_snapshot(std::move(copy));
    }
  }
}

AttentionObserver* MomentPass::observer(int layer) {
  return collectors_[static_cast<size_t>(layer)].get();
}

void MomentPass::layer_done(const RunPosition& next) {
  if (save_) save_(*this, next);
}

template <typename Copy>
void MomentPass::copy_side_by_side(const Copy& copy) const {
  const auto stream = present_stream(model_.compute().device);
  parallel_for(static_cast<int64_t>(collectors_.size()), [&](int64_t index) {
    const InferenceOn scope(stream);
    const auto layer = static_cast<size_t>(index);
    if (collectors_[layer]) copy(layer, *collectors_[layer]);
  });
}

std::vector<LayerStatistics> MomentPass::copied(SumsOfLayer sums) const {
  std::vector<LayerStatistics> statistics(collectors_.size());
  copy_side_by_side([&](size_t i, const Layer& layer) { statistics[i] = (layer.*sums)(); });
  for (size_t i = 0; i < statistics.size(); ++i) statistics[i].geometry = layers_[i];
  return statistics;
}

std::vector<LayerStatistics> MomentPass::with_metrics(
    std::vector<LayerStatistics> statistics) const {
  for (size_t i = 0; i < statistics.size(); ++i) {
    if (i == metrics_.size()) {
      const bool local = collectors_[i] == nullptr;
      metrics_.push_back(local ? MatrixStack<double>() : model_.o_proj_metric(static_cast<int>(i)));
    }
    statistics[i].o_proj_metric = metrics_[i];
  }
  return statistics;
}

std::vector<LayerStatistics> MomentPass::result() const {
  return with_metrics(copied(&Layer::result));
}

std::vector<LayerStatistics> MomentPass::block() const {
  return with_metrics(copied(&Layer::block));
}

std::vector<LayerStatistics> MomentPass::block_sums() const {
  std::vector<LayerStatistics> sums = copied(&Layer::block);
  std::erase_if(sums, [](const LayerStatistics& layer) { return !layer.geometry.fitted(); });
  return sums;
}

SumSnapshots MomentPass::blocks_before() const {
  SumSnapshots all(collectors_.size());
  copy_side_by_side([&](size_t i, const Layer& layer) { all[i] = layer.before(); });
  std::erase(all, nullptr);
  return all;
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
