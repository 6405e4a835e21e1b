// Rows of attention to the sums of a layer.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "oscar/attention/received_attention.h"
#include "oscar/calibrate/row_sums.h"
#include "oscar/fit/statistics.h"
#include "oscar/model/checkpoint/rope.h"
#include "oscar/model/layer_major.h"
#include "oscar/model/transformer.h"

namespace oscar {

// Sums in which rows count by the attention that they receive as INT2 rows (math 2.6).

// Rows, of each head, that are converted to float64 at a time.
int64_t attended_rows(torch::Device device);

// AttendedSums of one layer, float64 on the device.
class AttendedCollector {
 public:
  // `rope` must outlive it. The layer's sliding window takes the place of `view`'s.
  AttendedCollector(const LayerGeometry& geometry, const Rope& rope, const CacheView& view,
                    torch::Device device);

  void observe(const AttentionRecord& record);
  void add(const AttendedSums& saved);
  // Adds the sums of the same layer on the same device.
  void add(const AttendedCollector& other);
  // Throws Error naming layer and sum when a sum is not finite.
  AttendedSums result() const;
  void clear();  // begins again at zero

 private:
  struct Weighted {
    torch::Tensor moment, sum, weight;  // [Hkv, d, d], [Hkv, d], [Hkv]
  };

  LayerGeometry geometry_;
  const Rope& rope_;
  CacheView view_;
  Weighted q_, k_, v_;
  torch::Tensor sink_sum_, sink_weight_;  // [Hkv, d], [Hkv]
};

// The observer that turns attention tensors into fp64 sums on the device that computes them.

// Sums of one layer (LayerStatistics) kept as float64 tensors [Hkv, d, d] on the device. One
// addition per observed batch, in the order of the batches: the result is reproducible.
class MomentCollector final : public AttentionObserver {
 public:
  // With `attended`, of the same layer and device, its sums are collected too.
  MomentCollector(const LayerGeometry& geometry, torch::Device device,
                  std::optional<AttendedCollector> attended = {});

  void observe(const AttentionRecord& record) override;

  // Continues from saved sums (a later wave, a resumed run).
  void add(const LayerStatistics& saved);
  // Adds the sums of the same layer on the same device.
  void add(const MomentCollector& other);

  // Copies the sums to the host. Throws Error naming layer and moment when a sum is not finite.
  LayerStatistics result() const;

  void clear();  // begins again at zero
  int64_t count_kv() const { return count_kv_; }

 private:
  LayerGeometry geometry_;
  RowSums& gate_sums(torch::Device device);

  RowSums q_, k_, v_, attn_out_;
  std::optional<RowSums> gate_;  // of the query heads; once a gate has been seen
  std::optional<AttendedCollector> attended_;
  int64_t count_q_ = 0, count_kv_ = 0;
};

// Second pass of the energy objective: sum of w_t v_t^T v_t with w_t = k_t C_Q k_t^T, and the sum
// of w, so that the weights can be scaled to sum N at the end (math 2.3).
class EnergyCollector final : public AttentionObserver {
 public:
  // `q_covariance` is the final C_Q of the layer, [Hkv, d, d].
  EnergyCollector(const LayerGeometry& geometry, const MatrixStack<double>& q_covariance,
                  torch::Device device);

  void observe(const AttentionRecord& record) override;
  MatrixStack<double> result() const;  // [Hkv, d, d], weights scaled to sum to the token count

 private:
  LayerGeometry geometry_;
  torch::Tensor q_covariance_, moment_, weight_sum_;
  int64_t tokens_ = 0;
};

// The passes over the corpus that collect statistics, with checkpoints in between.

// Copies of running sums, of each layer in the order in which it went on. Their o_proj_metric,
// which does not change, is absent.
using SumSnapshots = std::vector<std::shared_ptr<const LayerStatistics>>;

struct Collected {
  std::vector<LayerStatistics> statistics;  // of all layers, with the output projection's metrics
  SumSnapshots snapshots;
};

// Where a layer's sums are added to those of the blocks before, and where they are copied.
struct SumMarks {
  std::vector<int64_t> block_tokens;     // CollectionPlan's
  std::vector<int64_t> snapshot_tokens;  // CollectionPlan's
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
  // cache, its rows are also summed by the attention that they receive.
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

  // Sums so far, with the output projection's metric of each layer, of its weights alone; of layers
  // that are not fitted none.
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

// M_O [Hkv, d, d] of gates whose sums over `tokens` are gate_moment [Hq, d, d] (math 1.2). `heads`:
// W_O,j W_O,j^T of every query head (Transformer::o_proj_head_metrics).
MatrixStack<double> gated_metric(const MatrixStack<double>& heads,
                                 const MatrixStack<double>& gate_moment, int64_t tokens,
                                 int num_kv_heads);

// Of layers whose outputs are gated, M_O with the gates of their text in the place of that of the
// weights alone.
void add_gates_to_metrics(const Transformer& model, std::vector<LayerStatistics>& statistics);

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
