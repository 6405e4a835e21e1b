// The collectors: which tensors go into which sums, and the way to and from the host.
#include "oscar/calibrate/collector.h"

#include <array>
#include <cstring>

#include "oscar/base/error.h"

namespace oscar {
namespace {

torch::Tensor zeros(std::initializer_list<int64_t> shape, torch::Device device) {
  return torch::zeros(shape, torch::dtype(torch::kFloat64).device(device));
}

template <typename Stack>
torch::Tensor to_device(const Stack& stack, at::IntArrayRef shape, torch::Device device) {
  return torch::from_blob(const_cast<double*>(stack.data.data()), shape, torch::kFloat64)
      .to(device, /*non_blocking=*/false, /*copy=*/true);
}

template <typename Stack>
void copy_out(const torch::Tensor& tensor, Stack& stack, int layer, const char* name) {
  const torch::Tensor host = tensor.to(torch::kCPU).contiguous();
  if (!torch::isfinite(host).all().item<bool>()) {
    throw Error(
        {.what = "a statistic is not finite",
         .where = "layer " + std::to_string(layer) + ", " + name,
         .hint = "the weights or activations of this layer overflow; check the checkpoint"});
  }
  std::memcpy(stack.data.data(), host.data_ptr<double>(), stack.data.size() * sizeof(double));
}

}  // namespace

MomentCollector::MomentCollector(const LayerGeometry& geometry, torch::Device device)
    : geometry_(geometry) {
  const int64_t heads = geometry.num_kv_heads, dk = geometry.head_dim_k, dv = geometry.head_dim_v;
  const auto sums = [&](int64_t d) {
    return RowSums{zeros({heads, d, d}, device), zeros({heads, d}, device)};
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
  const int64_t tokens = record.k.size(0) * record.k.size(2);
  count_kv_ += tokens;
  count_q_ += tokens * (record.q.size(1) / record.k.size(1));
}

void MomentCollector::add(const LayerStatistics& saved) {
  const auto add_to = [](RowSums& sums, const auto& moment, const auto& sum) {
    sums.moment.add_(to_device(moment, sums.moment.sizes(), sums.moment.device()));
    sums.sum.add_(to_device(sum, sums.sum.sizes(), sums.sum.device()));
  };
  add_to(q_, saved.q_moment, saved.q_sum);
  add_to(k_, saved.k_moment, saved.k_sum);
  add_to(v_, saved.v_moment, saved.v_sum);
  add_to(attn_out_, saved.attn_out_moment, saved.attn_out_sum);
  count_q_ += saved.count_q;
  count_kv_ += saved.count_kv;
}

LayerStatistics MomentCollector::result() const {
  LayerStatistics s = make_statistics(geometry_);
  const int layer = geometry_.layer_id;
  copy_out(q_.moment, s.q_moment, layer, "q_moment");
  copy_out(k_.moment, s.k_moment, layer, "k_moment");
  copy_out(v_.moment, s.v_moment, layer, "v_moment");
  copy_out(attn_out_.moment, s.attn_out_moment, layer, "attn_out_moment");
  copy_out(q_.sum, s.q_sum, layer, "q_sum");
  copy_out(k_.sum, s.k_sum, layer, "k_sum");
  copy_out(v_.sum, s.v_sum, layer, "v_sum");
  copy_out(attn_out_.sum, s.attn_out_sum, layer, "attn_out_sum");
  s.count_q = count_q_;
  s.count_kv = count_kv_;
  return s;
}

EnergyCollector::EnergyCollector(const LayerGeometry& geometry,
                                 const MatrixStack<double>& q_covariance, torch::Device device)
    : geometry_(geometry) {
  const int64_t heads = geometry.num_kv_heads, dk = geometry.head_dim_k, dv = geometry.head_dim_v;
  q_covariance_ = to_device(q_covariance, {heads, dk, dk}, device);
  moment_ = zeros({heads, dv, dv}, device);
  weight_sum_ = zeros({heads}, device);
}

void EnergyCollector::observe(const AttentionRecord& record) {
  const int64_t heads = geometry_.num_kv_heads;
  const torch::Tensor keys = rows_by_kv_head(record.k, heads);
  const torch::Tensor values = rows_by_kv_head(record.v, heads);
  for (int64_t h = 0; h < heads; ++h) {
    const torch::Tensor k = keys[h].to(torch::kFloat64), v = values[h].to(torch::kFloat64);
    const torch::Tensor w = (torch::mm(k, q_covariance_[h]) * k).sum(1);  // [rows]
    moment_[h].add_(torch::mm((v * w.unsqueeze(1)).t(), v));
    weight_sum_[h].add_(w.sum());
  }
  tokens_ += record.k.size(0) * record.k.size(2);
}

MatrixStack<double> EnergyCollector::result() const {
  MatrixStack<double> moment(geometry_.num_kv_heads, geometry_.head_dim_v, geometry_.head_dim_v);
  const torch::Tensor scale = static_cast<double>(tokens_) / weight_sum_.clamp_min(1e-300);
  copy_out(moment_ * scale.view({-1, 1, 1}), moment, geometry_.layer_id, "v_energy_moment");
  return moment;
}

}  // namespace oscar
