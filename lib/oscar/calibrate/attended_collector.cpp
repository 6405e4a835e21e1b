// What the rows of a sequence add to the sums.
#include "oscar/calibrate/attended_collector.h"

#include <algorithm>

#include "oscar/calibrate/host_sums.h"
#include "oscar/executor/run_plan.h"
#include "oscar/model/attention.h"

namespace oscar {
namespace {

// rows [sequences * Hkv, n, d] any float type, weights [sequences * Hkv, n]: adds sum of w x^T x,
// of w x and of w.
void add_weighted(const torch::Tensor& rows, const torch::Tensor& weights, torch::Tensor& moment,
                  torch::Tensor& sum, torch::Tensor& weight) {
  const auto x = rows.to(torch::kFloat64), w = weights.to(torch::kFloat64).unsqueeze(2);
  const auto weighted = x * w;
  const int64_t heads = weight.size(0), d = x.size(2);
  moment.add_(torch::bmm(weighted.transpose(1, 2), x).view({-1, heads, d, d}).sum(0));
  sum.add_(weighted.sum(1).view({-1, heads, d}).sum(0));
  weight.add_(w.sum({1, 2}).view({-1, heads}).sum(0));
}

}  // namespace

AttendedCollector::AttendedCollector(const LayerGeometry& geometry, const Rope& rope,
                                     const CacheView& view, torch::Device device)
    : geometry_(geometry), rope_(rope), view_(view) {
  view_.sliding_window = geometry.sliding_window;
  const int64_t heads = geometry.num_kv_heads;
  const auto sums = [&](int64_t d) {
    return Weighted{zero_sums({heads, d, d}, device), zero_sums({heads, d}, device),
                    zero_sums({heads}, device)};
  };
  q_ = sums(geometry.head_dim_k);
  k_ = sums(geometry.head_dim_k);
  v_ = sums(geometry.head_dim_v);
  sink_sum_ = zero_sums({heads, geometry.head_dim_k}, device);
  sink_weight_ = zero_sums({heads}, device);
}

void AttendedCollector::observe(const AttentionRecord& record) {
  // Sequences lie beside each other as if they were heads: their positions are the same.
  const auto q = record.q.flatten(0, 1), k = record.k.flatten(0, 1), v = record.v.flatten(0, 1);
  const int64_t rows = k.size(0), tokens = k.size(1), heads = geometry_.num_kv_heads;
  const ReceivedAttention received = received_attention(q, k, view_, record.sm_scale);
  if (received.queries.empty()) return;
  const auto back = torch::arange(tokens, torch::dtype(torch::kInt64).device(q.device()))
                        .add(record.first_position)
                        .neg();
  const int64_t together = std::max<int64_t>(1, attended_rows(q.device()) / record.q.size(0));
  const auto in_blocks = [&](int64_t count, const auto& add) {
    for (int64_t begin = 0; begin < count; begin += together) {
      add(begin, std::min(begin + together, count));
    }
  };
  const auto sampled =
      q.index_select(
           1, torch::tensor(received.queries, torch::kInt64).to(q.device(), /*non_blocking=*/true))
          .reshape({rows, -1, q.size(2)});
  const auto weights = received.query.view({rows, -1});
  in_blocks(sampled.size(1), [&](int64_t begin, int64_t end) {
    add_weighted(sampled.slice(1, begin, end), weights.slice(1, begin, end), q_.moment, q_.sum,
                 q_.weight);
  });
  in_blocks(tokens, [&](int64_t begin, int64_t end) {
    const auto key_weights = received.key.slice(1, begin, end);
    const auto unrotated = move_positions(k.slice(1, begin, end), rope_, back.slice(0, begin, end));
    add_weighted(unrotated, key_weights, k_.moment, k_.sum, k_.weight);
    add_weighted(v.slice(1, begin, end), received.value.slice(1, begin, end), v_.moment, v_.sum,
                 v_.weight);
    const auto sinks = (key_weights * received.sink.slice(1, begin, end)).to(torch::kFloat64);
    sink_sum_.add_(torch::bmm(sinks.unsqueeze(1), unrotated.to(torch::kFloat64))
                       .view({-1, heads, k.size(2)})
                       .sum(0));
    sink_weight_.add_(sinks.sum(1).view({-1, heads}).sum(0));
  });
}

void AttendedCollector::add(const AttendedSums& saved) {
  if (saved.empty()) {
    throw Error({.what = "saved sums lack those weighted by attention",
                 .where = "layer " + std::to_string(geometry_.layer_id),
                 .hint = "start anew"});
  }
  add_values(q_.moment, saved.q_moment.data);
  add_values(k_.moment, saved.k_moment.data);
  add_values(v_.moment, saved.v_moment.data);
  add_values(k_.sum, saved.k_sum.data);
  add_values(v_.sum, saved.v_sum.data);
  add_values(sink_sum_, saved.k_sink_sum.data);
  add_values(q_.weight, saved.q_weight);
  add_values(k_.weight, saved.k_weight);
  add_values(v_.weight, saved.v_weight);
  add_values(sink_weight_, saved.k_sink_weight);
}

void AttendedCollector::add(const AttendedCollector& other) {
  const auto add_to = [](Weighted& sums, const Weighted& more) {
    sums.moment.add_(more.moment);
    sums.sum.add_(more.sum);
    sums.weight.add_(more.weight);
  };
  add_to(q_, other.q_);
  add_to(k_, other.k_);
  add_to(v_, other.v_);
  sink_sum_.add_(other.sink_sum_);
  sink_weight_.add_(other.sink_weight_);
}

AttendedSums AttendedCollector::result() const {
  AttendedSums s = make_attended_sums(geometry_);
  const int layer = geometry_.layer_id;
  copy_moments(q_.moment, s.q_moment.data, layer, "q_attended_moment");
  copy_moments(k_.moment, s.k_moment.data, layer, "k_attended_moment");
  copy_moments(v_.moment, s.v_moment.data, layer, "v_attended_moment");
  copy_values(k_.sum, s.k_sum.data, layer, "k_attended_sum");
  copy_values(v_.sum, s.v_sum.data, layer, "v_attended_sum");
  copy_values(sink_sum_, s.k_sink_sum.data, layer, "k_sink_sum");
  copy_values(q_.weight, s.q_weight, layer, "q_attended_weight");
  copy_values(k_.weight, s.k_weight, layer, "k_attended_weight");
  copy_values(v_.weight, s.v_weight, layer, "v_attended_weight");
  copy_values(sink_weight_, s.k_sink_weight, layer, "k_sink_weight");
  return s;
}

void AttendedCollector::clear() {
  for (Weighted* sums : {&q_, &k_, &v_}) {
    sums->moment.zero_();
    sums->sum.zero_();
    sums->weight.zero_();
  }
  sink_sum_.zero_();
  sink_weight_.zero_();
}

}  // namespace oscar
