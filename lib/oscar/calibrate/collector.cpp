// The collectors: which tensors go into which sums.
#include "oscar/calibrate/collector.h"

#include <array>
#include <utility>

#include "oscar/calibrate/host_sums.h"

namespace oscar {
namespace {

torch::Tensor to_device(const MatrixStack<double>& stack, torch::Device device) {
  const std::vector<int64_t> shape = {stack.count, stack.rows, stack.cols};
  torch::Tensor tensor = zero_sums(shape, device);
  add_values(tensor, stack.data);
  return tensor;
}

}  // namespace

MomentCollector::MomentCollector(const LayerGeometry& geometry, torch::Device device,
                                 std::optional<AttendedCollector> attended)
    : geometry_(geometry), attended_(std::move(attended)) {
  const int64_t heads = geometry.num_kv_heads, dk = geometry.head_dim_k, dv = geometry.head_dim_v;
  const auto sums = [&](int64_t d) {
    return RowSums{zero_sums({heads, d, d}, device), zero_sums({heads, d}, device)};
  };
  q_ = sums(dk);
  k_ = sums(dk);
  v_ = sums(dv);
  attn_out_ = sums(dv);
}

void MomentCollector::observe(const AttentionRecord& record) {
  const std::array<RowSumsTask, 4> tasks{
      {{record.q, q_}, {record.k, k_}, {record.v, v_}, {record.o, attn_out_}}};
  add_row_sums(tasks);
  if (attended_) attended_->observe(record);
  const int64_t tokens = record.k.size(0) * record.k.size(2);
  count_kv_ += tokens;
  count_q_ += tokens * (record.q.size(1) / record.k.size(1));
}

void MomentCollector::add(const LayerStatistics& saved) {
  const auto add_to = [](RowSums& sums, const auto& moment, const auto& sum) {
    add_values(sums.moment, moment.data);
    add_values(sums.sum, sum.data);
  };
  add_to(q_, saved.q_moment, saved.q_sum);
  add_to(k_, saved.k_moment, saved.k_sum);
  add_to(v_, saved.v_moment, saved.v_sum);
  add_to(attn_out_, saved.attn_out_moment, saved.attn_out_sum);
  if (attended_) attended_->add(saved.attended);
  count_q_ += saved.count_q;
  count_kv_ += saved.count_kv;
}

void MomentCollector::add(const MomentCollector& other) {
  const auto add_to = [](RowSums& sums, const RowSums& more) {
    sums.moment.add_(more.moment);
    sums.sum.add_(more.sum);
  };
  add_to(q_, other.q_);
  add_to(k_, other.k_);
  add_to(v_, other.v_);
  add_to(attn_out_, other.attn_out_);
  if (attended_) attended_->add(other.attended_.value());
  count_q_ += other.count_q_;
  count_kv_ += other.count_kv_;
}

LayerStatistics MomentCollector::result() const {
  LayerStatistics s = make_statistics(geometry_);
  const int layer = geometry_.layer_id;
  copy_moments(q_.moment, s.q_moment.data, layer, "q_moment");
  copy_moments(k_.moment, s.k_moment.data, layer, "k_moment");
  copy_moments(v_.moment, s.v_moment.data, layer, "v_moment");
  copy_moments(attn_out_.moment, s.attn_out_moment.data, layer, "attn_out_moment");
  copy_values(q_.sum, s.q_sum.data, layer, "q_sum");
  copy_values(k_.sum, s.k_sum.data, layer, "k_sum");
  copy_values(v_.sum, s.v_sum.data, layer, "v_sum");
  copy_values(attn_out_.sum, s.attn_out_sum.data, layer, "attn_out_sum");
  if (attended_) s.attended = attended_->result();
  s.count_q = count_q_;
  s.count_kv = count_kv_;
  return s;
}

void MomentCollector::clear() {
  for (RowSums* sums : {&q_, &k_, &v_, &attn_out_}) {
    sums->moment.zero_();
    sums->sum.zero_();
  }
  if (attended_) attended_->clear();
  count_q_ = count_kv_ = 0;
}

EnergyCollector::EnergyCollector(const LayerGeometry& geometry,
                                 const MatrixStack<double>& q_covariance, torch::Device device)
    : geometry_(geometry) {
  const int64_t heads = geometry.num_kv_heads, dv = geometry.head_dim_v;
  q_covariance_ = to_device(q_covariance, device);
  moment_ = zero_sums({heads, dv, dv}, device);
  weight_sum_ = zero_sums({heads}, device);
}

void EnergyCollector::observe(const AttentionRecord& record) {
  const int64_t heads = geometry_.num_kv_heads;
  const torch::Tensor keys = rows_by_kv_head(record.k, heads);
  const torch::Tensor values = rows_by_kv_head(record.v, heads);
  for (int64_t h = 0; h < heads; ++h) {
    const torch::Tensor k = keys[h].to(torch::kFloat64), v = values[h].to(torch::kFloat64);
    const torch::Tensor products = torch::mm(k, q_covariance_[h]) * k;
    moment_[h].add_(torch::mm((v * products.sum(1, true)).t(), v));
    weight_sum_[h].add_(products.sum(0).sum());  // by columns, whatever the number of threads
  }
  tokens_ += record.k.size(0) * record.k.size(2);
}

MatrixStack<double> EnergyCollector::result() const {
  MatrixStack<double> moment(geometry_.num_kv_heads, geometry_.head_dim_v, geometry_.head_dim_v);
  const torch::Tensor scale = static_cast<double>(tokens_) / weight_sum_.clamp_min(1e-300);
  copy_moments(moment_ * scale.view({-1, 1, 1}), moment.data, geometry_.layer_id,
               "v_energy_moment");
  return moment;
}

}  // namespace oscar
