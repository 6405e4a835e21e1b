// Attention of sampled queries, recomputed from q and k, and what its rows add to the sums.
#include "oscar/calibrate/attended_collector.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "oscar/calibrate/host_sums.h"
#include "oscar/executor/run_plan.h"
#include "oscar/model/attention.h"

namespace oscar {
namespace {

// One position of each stride of `tokens`, of those that read INT2 rows.
std::vector<int64_t> sampled_queries(const CacheView& view, int64_t tokens) {
  constexpr int64_t kStep = 7;  // shares no factor with the stride: every place has its turn
  std::vector<int64_t> positions;
  for (int64_t m = 0; m * kQueryStride < tokens; ++m) {
    const int64_t i = m * kQueryStride + kStep * m % kQueryStride;
    if (i < tokens && int2_end(view, i) > std::max(view.sink, first_visible(view, i))) {
      positions.push_back(i);
    }
  }
  return positions;
}

torch::Tensor column(const std::vector<int64_t>& values, torch::Device device) {
  return torch::tensor(values, torch::kInt64).to(device).unsqueeze(1);
}

// Which keys [begin, end) of positions each query sees at all, and which of them as INT2.
struct Reach {
  torch::Tensor visible, int2;  // [queries, tokens] bool
};

Reach reach_of(const CacheView& view, const std::vector<int64_t>& queries, int64_t tokens,
               torch::Device device) {
  std::vector<int64_t> first, end;
  for (const int64_t i : queries) {
    first.push_back(first_visible(view, i));
    end.push_back(int2_end(view, i));
  }
  const auto key = torch::arange(tokens, torch::dtype(torch::kInt64).device(device)).unsqueeze(0);
  const auto seen = key.le(column(queries, device)).logical_and(key.ge(column(first, device)));
  return {seen, seen.logical_and(key.ge(view.sink)).logical_and(key.lt(column(end, device)))};
}

// rows [Hkv, n, d] any float type, weights [Hkv, n]: adds sum of w x^T x, of w x and of w.
void add_weighted(const torch::Tensor& rows, const torch::Tensor& weights, torch::Tensor& moment,
                  torch::Tensor& sum, torch::Tensor& weight) {
  const auto x = rows.to(torch::kFloat64), w = weights.to(torch::kFloat64).unsqueeze(2);
  const auto weighted = x * w;
  moment.add_(torch::bmm(weighted.transpose(1, 2), x));
  sum.add_(weighted.sum(1));
  weight.add_(w.sum({1, 2}));
}

}  // namespace

ReceivedAttention received_attention(const torch::Tensor& q, const torch::Tensor& k,
                                     const CacheView& view, double sm_scale) {
  const torch::Device device = q.device();
  const int64_t query_heads = q.size(0), heads = k.size(0), tokens = k.size(1);
  const int64_t group = query_heads / heads;
  const auto options = torch::dtype(torch::kFloat32).device(device);
  ReceivedAttention received{.queries = sampled_queries(view, tokens),
                             .key = torch::zeros({heads, tokens}, options),
                             .value = torch::zeros({heads, tokens}, options),
                             .query = torch::zeros({query_heads, 0}, options),
                             .sink = torch::zeros({heads, tokens}, options)};
  const auto count = static_cast<int64_t>(received.queries.size());
  if (count == 0) return received;
  const auto keys = k.to(torch::kFloat32).transpose(1, 2);  // [Hkv, d, tokens]
  std::vector<torch::Tensor> query_weights;
  for (int64_t begin = 0; begin < count;) {
    const int64_t last = std::min(
        count, begin + std::max<int64_t>(1, observer_scores(device) / (query_heads * tokens)));
    const std::vector<int64_t> own(received.queries.begin() + begin,
                                   received.queries.begin() + last);
    const int64_t n = last - begin, reach = own.back() + 1;
    const Reach rows = reach_of(view, own, reach, device);
    const auto queries = q.index_select(1, torch::tensor(own, torch::kInt64).to(device))
                             .to(torch::kFloat32)
                             .reshape({heads, group * n, q.size(2)});
    auto p = torch::bmm(queries, keys.slice(2, 0, reach)).mul_(sm_scale);
    p.view({heads, group, n, reach})
        .masked_fill_(rows.visible.logical_not(), -std::numeric_limits<float>::infinity());
    p = p.softmax(-1).view({heads, group, n, reach}).mul_(rows.int2);
    const auto squares = p.square();
    const auto rest = p.sub_(squares);  // p (1 - p)
    const auto int2_rows = rows.int2.to(torch::kFloat32);
    const auto even = int2_rows / int2_rows.sum(1, /*keepdim=*/true);  // [n, reach]
    const auto add = [&](torch::Tensor& weights, const torch::Tensor& attention) {
      const auto total = attention.sum({1, 3});  // [Hkv, n]
      weights.slice(1, 0, reach)
          .add_(attention.sum({1, 2}), 1 - kEvenShare)
          .add_(torch::matmul(total, even), kEvenShare);
    };
    add(received.key, rest);
    add(received.value, squares);
    query_weights.push_back(rest.sum(3).reshape({query_heads, n}));
    begin = last;
  }
  received.query = torch::cat(query_weights, 1);
  const int64_t end = std::max(view.sink, int2_end(view, tokens - 1));
  const auto int2_keys = received.key.slice(1, view.sink, end);
  received.sink.slice(1, view.sink, end)
      .copy_(int2_keys.gt(kSinkFactor * int2_keys.mean(1, /*keepdim=*/true)));
  return received;
}

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
  const double sm_scale = 1.0 / std::sqrt(static_cast<double>(geometry_.head_dim_k));
  const int64_t heads = geometry_.num_kv_heads, tokens = record.k.size(2);
  const auto back = torch::arange(tokens, torch::kInt64).add(record.first_position).neg();
  for (int64_t i = 0; i < record.q.size(0); ++i) {
    const auto q = record.q[i], k = record.k[i];
    const ReceivedAttention received = received_attention(q, k, view_, sm_scale);
    if (received.queries.empty()) continue;
    const auto sampled =
        q.index_select(1, torch::tensor(received.queries, torch::kInt64).to(q.device()))
            .reshape({heads, -1, q.size(2)});
    const auto weights = received.query.view({heads, -1});
    for (int64_t begin = 0; begin < sampled.size(1); begin += kObserverRows) {
      const int64_t end = std::min(begin + kObserverRows, sampled.size(1));
      add_weighted(sampled.slice(1, begin, end), weights.slice(1, begin, end), q_.moment, q_.sum,
                   q_.weight);
    }
    for (int64_t begin = 0; begin < tokens; begin += kObserverRows) {
      const int64_t end = std::min(begin + kObserverRows, tokens);
      const auto key_weights = received.key.slice(1, begin, end);
      const auto unrotated =
          move_positions(k.slice(1, begin, end), rope_, back.slice(0, begin, end));
      add_weighted(unrotated, key_weights, k_.moment, k_.sum, k_.weight);
      add_weighted(record.v[i].slice(1, begin, end), received.value.slice(1, begin, end), v_.moment,
                   v_.sum, v_.weight);
      const auto sinks = (key_weights * received.sink.slice(1, begin, end)).to(torch::kFloat64);
      sink_sum_.add_(torch::bmm(sinks.unsqueeze(1), unrotated.to(torch::kFloat64)).squeeze(1));
      sink_weight_.add_(sinks.sum(1));
    }
  }
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

AttendedSums AttendedCollector::result() const {
  AttendedSums s = make_attended_sums(geometry_);
  const int layer = geometry_.layer_id;
  copy_values(q_.moment, s.q_moment.data, layer, "q_attended_moment");
  copy_values(k_.moment, s.k_moment.data, layer, "k_attended_moment");
  copy_values(v_.moment, s.v_moment.data, layer, "v_attended_moment");
  copy_values(k_.sum, s.k_sum.data, layer, "k_attended_sum");
  copy_values(v_.sum, s.v_sum.data, layer, "v_attended_sum");
  copy_values(sink_sum_, s.k_sink_sum.data, layer, "k_sink_sum");
  copy_values(q_.weight, s.q_weight, layer, "q_attended_weight");
  copy_values(k_.weight, s.k_weight, layer, "k_attended_weight");
  copy_values(v_.weight, s.v_weight, layer, "v_attended_weight");
  copy_values(sink_weight_, s.k_sink_weight, layer, "k_sink_weight");
  return s;
}

}  // namespace oscar
