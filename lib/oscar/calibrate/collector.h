// The observer that turns attention tensors into fp64 sums on the device that computes them.
#pragma once

#include <optional>

#include "oscar/calibrate/attended_collector.h"
#include "oscar/calibrate/row_sums.h"
#include "oscar/fit/statistics.h"
#include "oscar/model/observer.h"

namespace oscar {

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
  RowSums q_, k_, v_, attn_out_;
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

}  // namespace oscar
