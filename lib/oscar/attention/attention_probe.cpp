// Scores, softmax and errors of the chosen queries as batched matrix products.
#include "oscar/attention/attention_probe.h"

#include <algorithm>
#include <limits>

namespace oscar {
namespace {

torch::Tensor as_column(const std::vector<int64_t>& values, torch::Device device) {
  return torch::tensor(values, torch::kInt64).to(device).unsqueeze(1);
}

}  // namespace

AttentionProbe::AttentionProbe(const CacheView& view, const std::vector<int64_t>& positions,
                               const torch::Tensor& q, const torch::Tensor& k,
                               const torch::Tensor& v, const torch::Tensor& output_metric,
                               double sm_scale, const torch::Tensor& gate)
    : num_kv_heads_(k.size(0)),
      query_group_(q.size(0) / k.size(0)),
      queries_(q.size(1)),
      sm_scale_(sm_scale),
      values_(v.to(torch::kFloat32)),
      metric_(output_metric.to(torch::kFloat32)),
      gate_(gate) {
  const torch::Device device = q.device();
  std::vector<int64_t> ends, lowest;
  for (const int64_t position : positions) {
    ends.push_back(std::min(int2_end(view, position), position + 1));
    lowest.push_back(first_visible(view, position));
  }
  first_int2_ = std::min(std::max(view.sink, lowest.front()), k.size(1));
  end_int2_ = std::max(first_int2_, *std::max_element(ends.begin(), ends.end()));
  end_shared_ = std::clamp(*std::min_element(ends.begin(), ends.end()), first_int2_, end_int2_);
  const auto position = as_column(positions, device), first = as_column(lowest, device);
  const auto key =
      torch::arange(k.size(1), torch::TensorOptions(torch::kInt64).device(device)).unsqueeze(0);
  const auto hidden = key.gt(position).logical_or(key.lt(first));  // [queries, tokens]
  const auto candidates = key.slice(1, first_int2_, end_int2_);
  is_int2_ = candidates.lt(as_column(ends, device)).logical_and(candidates.ge(first));

  q_ = q.to(torch::kFloat32).reshape({num_kv_heads_, query_group_ * queries_, q.size(2)});
  scores_ = torch::matmul(q_, k.to(torch::kFloat32).transpose(1, 2)).mul_(sm_scale_);
  scores_.view({num_kv_heads_, query_group_, queries_, -1})
      .masked_fill_(hidden, -std::numeric_limits<float>::infinity());
  weights_ = scores_.softmax(-1);
  output_ = torch::matmul(weights_, values_);
}

torch::Tensor AttentionProbe::weights(const Int2Rows& keys) const {
  if (end_int2_ == first_int2_) return weights_;
  const auto rotated = torch::matmul(q_, keys.partner).mul_(sm_scale_);
  auto rounded = torch::matmul(rotated, keys.rows.slice(1, first_int2_, end_int2_).transpose(1, 2));
  if (keys.mean.defined()) {
    rounded.add_(torch::matmul(q_, keys.mean.unsqueeze(-1)).mul_(sm_scale_));
  }
  auto scores = scores_.clone();
  const auto by_query = [&](const torch::Tensor& t) {
    return t.view({num_kv_heads_, query_group_, queries_, -1});
  };
  auto target = by_query(scores).slice(3, first_int2_, end_int2_);
  target.copy_(torch::where(is_int2_, by_query(rounded), target));
  return scores.softmax(-1);
}

torch::Tensor AttentionProbe::int2_part(const torch::Tensor& weights) const {
  return weights.slice(2, first_int2_, end_int2_)
      .reshape({num_kv_heads_, query_group_, queries_, end_int2_ - first_int2_})
      .mul(is_int2_)
      .view({num_kv_heads_, query_group_ * queries_, end_int2_ - first_int2_});
}

torch::Tensor AttentionProbe::key_error(const torch::Tensor& weights) const {
  return torch::matmul(weights, values_).sub_(output_);
}

torch::Tensor AttentionProbe::value_error(const torch::Tensor& int2_part,
                                          const Int2Rows& values) const {
  return torch::matmul(int2_part, values.rows.slice(1, first_int2_, end_int2_));
}

torch::Tensor AttentionProbe::pair_error(const torch::Tensor& weights,
                                         const Int2Rows& values) const {
  // Each key's weight meets one row, but where queries differ on which that is.
  const auto part = [&](const torch::Tensor& rows, int64_t begin, int64_t end) {
    return torch::matmul(weights.slice(2, begin, end), rows);
  };
  const int64_t tokens = values_.size(1);
  const auto shared =
      values_.slice(1, first_int2_, end_shared_) + values.rows.slice(1, first_int2_, end_shared_);
  auto error = part(values_.slice(1, end_shared_, tokens), end_shared_, tokens).sub_(output_);
  error.add_(part(values_.slice(1, 0, first_int2_), 0, first_int2_));
  error.add_(part(shared, first_int2_, end_shared_));
  if (end_int2_ > end_shared_) {
    const auto mixed = int2_part(weights).slice(2, end_shared_ - first_int2_);
    error.add_(torch::matmul(mixed, values.rows.slice(1, end_shared_, end_int2_)));
  }
  return error;
}

torch::Tensor AttentionProbe::loss(const torch::Tensor& error) const {
  auto by_head = error.reshape({num_kv_heads_ * query_group_, queries_, -1});
  if (gate_.defined()) by_head = by_head * gate_;
  return torch::matmul(by_head, metric_)
      .mul_(by_head)
      .sum(-1, /*keepdim=*/false, torch::kFloat64)
      .view({num_kv_heads_, query_group_, queries_})
      .sum(1);
}

}  // namespace oscar
