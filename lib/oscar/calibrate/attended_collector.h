// Sums in which rows count by the attention that they receive as INT2 rows (math 2.6).
#pragma once

#include "oscar/checkpoint/rope.h"
#include "oscar/fit/statistics.h"
#include "oscar/int2/received_attention.h"
#include "oscar/model/observer.h"

namespace oscar {

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

}  // namespace oscar
