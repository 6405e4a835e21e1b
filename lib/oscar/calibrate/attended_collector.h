// Sums in which rows count by the attention that they receive as INT2 rows (math 2.6).
#pragma once

#include "oscar/checkpoint/rope.h"
#include "oscar/fit/statistics.h"
#include "oscar/int2/cache_view.h"
#include "oscar/model/observer.h"

namespace oscar {

// One query of each kQueryStride is looked at, at another place of every stride, so that texts with
// a period do not always show the same one.
inline constexpr int64_t kQueryStride = 16;
// Share of a query's weight that is spread evenly over the INT2 rows it reads.
inline constexpr double kEvenShare = 0.1;
// A sink receives this many times the mean weight of its sequence's INT2 rows.
inline constexpr double kSinkFactor = 10;

// What rows of one sequence weigh, float32 on the device of its queries.
struct ReceivedAttention {
  std::vector<int64_t> queries;  // positions of those that were looked at
  torch::Tensor key, value;      // [Hkv, tokens] weights of key and value rows
  torch::Tensor query;           // [Hq, queries] weights of query rows
  torch::Tensor sink;            // [Hkv, tokens] 1 where a key is one, else 0
};

// q [Hq, tokens, d], k [Hkv, tokens, d], both after RoPE. `view` says which rows a query reads as
// INT2. All weights are 0 when no query reads any.
ReceivedAttention received_attention(const torch::Tensor& q, const torch::Tensor& k,
                                     const CacheView& view, double sm_scale);

// AttendedSums of one layer, float64 on the device. One addition per observed sequence.
class AttendedCollector {
 public:
  // `rope` must outlive it. The layer's sliding window takes the place of `view`'s.
  AttendedCollector(const LayerGeometry& geometry, const Rope& rope, const CacheView& view,
                    torch::Device device);

  void observe(const AttentionRecord& record);
  void add(const AttendedSums& saved);
  // Throws Error naming layer and sum when a sum is not finite.
  AttendedSums result() const;

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
