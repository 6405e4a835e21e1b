// The passes over the corpus that collect statistics, with checkpoints in between.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "oscar/calibrate/collector.h"
#include "oscar/executor/layer_major.h"

namespace oscar {

// Copies of running sums, of each layer in the order in which it went on. Their o_proj_metric,
// which does not change, is absent.
using SumSnapshots = std::vector<std::shared_ptr<const LayerStatistics>>;

struct Collected {
  std::vector<LayerStatistics> statistics;  // of all layers, with the output projection's metrics
  SumSnapshots snapshots;
};

// Where a layer's sums are added to those of the blocks before, and where they are copied.
struct SumMarks {
  std::vector<int64_t> block_tokens;     // RunPlan's
  std::vector<int64_t> snapshot_tokens;  // RunPlan's
};

// First pass: all moments and sums of every layer that is not local. Sums of a block and those of
// the blocks before stay on the device between waves, so the additions are those of one
// uninterrupted run whatever the waves and however often it resumed.
class MomentPass final : public LayerVisitor {
 public:
  // Called where a checkpoint may be taken, with the position that a resumed run starts from. May
  // be empty.
  using SavePoint = std::function<void(const MomentPass& sums, const RunPosition& next)>;

  // A quantized layer's sums are copied to the host when it has seen exactly so many tokens as each
  // entry of `marks.snapshot_tokens` says, at a block's end. With `attended`, the windows of the
  // cache, its rows are also summed by the attention that they receive (attended_collector.h).
  MomentPass(const Transformer& model, const std::vector<LayerGeometry>& layers, SavePoint save,
             const SumMarks& marks = {}, const std::optional<CacheView>& attended = {});
  ~MomentPass() override;

  // Continues from block() and blocks_before() of the run that was saved and the copies that it had
  // taken; layers that have none begin at zero. Throws Error when a shape is not that of the
  // model's layer.
  void restore(const std::vector<LayerStatistics>& block, const SumSnapshots& before = {},
               SumSnapshots snapshots = {});

  AttentionObserver* observer(int layer) override;
  void layer_done(const RunPosition& next) override;

  // Sums so far, with the output projection's metric of each layer; of local layers none.
  std::vector<LayerStatistics> result() const;
  // For a checkpoint: the sums of the block that a layer is in, or at a block's end all of them;
  // and those of the blocks before that block, of layers that have any.
  std::vector<LayerStatistics> block() const;
  SumSnapshots blocks_before() const;
  // block() of the layers that are not local, without metrics.
  std::vector<LayerStatistics> block_sums() const;
  SumSnapshots snapshots() const;

 private:
  class Layer;

  using SumsOfLayer = LayerStatistics (Layer::*)() const;

  // `copy(index, layer)` of the layers that are not local, side by side.
  template <typename Copy>
  void copy_side_by_side(const Copy& copy) const;
  // Of local layers the geometry alone.
  std::vector<LayerStatistics> copied(SumsOfLayer sums) const;
  std::vector<LayerStatistics> with_metrics(std::vector<LayerStatistics> statistics) const;

  const Transformer& model_;
  std::vector<LayerGeometry> layers_;
  std::vector<std::unique_ptr<Layer>> collectors_;  // [num_layers]; null: a local layer
  SavePoint save_;
  // Of each layer, once asked for: they do not change, and cost more than the rest of a checkpoint.
  mutable std::vector<MatrixStack<double>> metrics_;
};

// Throws Error unless every layer that is not local has counted `tokens` keys: that nothing was
// left out and nothing added twice, however often and under whatever plans the run was resumed.
void check_counts(const std::vector<LayerStatistics>& statistics, int64_t tokens);

// Second pass, for the energy objective only: fills v_energy_moment with the final C_Q.
class EnergyPass final : public LayerVisitor {
 public:
  EnergyPass(const std::vector<LayerStatistics>& statistics, torch::Device device);

  AttentionObserver* observer(int layer) override;
  void layer_done(const RunPosition&) override {}
  void store(std::vector<LayerStatistics>& statistics) const;

 private:
  std::vector<std::optional<EnergyCollector>> collectors_;  // [num_layers]; none: a local layer
};

}  // namespace oscar
