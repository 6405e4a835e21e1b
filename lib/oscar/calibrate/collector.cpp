// fp64 products of the observer's own tensors. Float64 throughout: bf16 inputs are exact in it, and
// neither TF32 nor reduced-precision accumulation can enter.
#include "oscar/calibrate/collector.h"

#include <cstring>

#include "oscar/base/error.h"

namespace oscar {
namespace {

torch::Tensor zeros(std::initializer_list<int64_t> shape, torch::Device device) {
  return torch::zeros(shape, torch::dtype(torch::kFloat64).device(device));
}

// [batch, heads, tokens, d] -> [num_kv_heads, rows, d]: rows run over batch, group and tokens.
torch::Tensor rows_by_kv_head(const torch::Tensor& x, int64_t num_kv_heads) {
  const int64_t batch = x.size(0), group = x.size(1) / num_kv_heads, d = x.size(3);
  return x.reshape({batch, num_kv_heads, group * x.size(2), d})
      .transpose(0, 1)
      .reshape({num_kv_heads, -1, d});
}

// Adds sum of x^T x and sum of x of one batch, a head at a time so that the float64 copy of a long
// context stays small.
void accumulate(torch::Tensor& moment, torch::Tensor& sum, const torch::Tensor& x) {
  const int64_t heads = moment.size(0);
  const torch::Tensor rows = rows_by_kv_head(x, heads);
  for (int64_t h = 0; h < heads; ++h) {
    const torch::Tensor head = rows[h].to(torch::kFloat64);
    moment[h].add_(torch::mm(head.t(), head));
    sum[h].add_(head.sum(0));
  }
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
  q_moment_ = zeros({heads, dk, dk}, device);
  k_moment_ = zeros({heads, dk, dk}, device);
  v_moment_ = zeros({heads, dv, dv}, device);
  attn_out_moment_ = zeros({heads, dv, dv}, device);
  q_sum_ = zeros({heads, dk}, device);
  k_sum_ = zeros({heads, dk}, device);
  v_sum_ = zeros({heads, dv}, device);
  attn_out_sum_ = zeros({heads, dv}, device);
}

void MomentCollector::observe(const AttentionRecord& record) {
  accumulate(q_moment_, q_sum_, record.q);
  accumulate(k_moment_, k_sum_, record.k);
  accumulate(v_moment_, v_sum_, record.v);
  accumulate(attn_out_moment_, attn_out_sum_, record.o);
  const int64_t tokens = record.k.size(0) * record.k.size(2);
  count_kv_ += tokens;
  count_q_ += tokens * (record.q.size(1) / record.k.size(1));
}

void MomentCollector::add(const LayerStatistics& saved) {
  const auto device = q_moment_.device();
  q_moment_.add_(to_device(saved.q_moment, q_moment_.sizes(), device));
  k_moment_.add_(to_device(saved.k_moment, k_moment_.sizes(), device));
  v_moment_.add_(to_device(saved.v_moment, v_moment_.sizes(), device));
  attn_out_moment_.add_(to_device(saved.attn_out_moment, attn_out_moment_.sizes(), device));
  q_sum_.add_(to_device(saved.q_sum, q_sum_.sizes(), device));
  k_sum_.add_(to_device(saved.k_sum, k_sum_.sizes(), device));
  v_sum_.add_(to_device(saved.v_sum, v_sum_.sizes(), device));
  attn_out_sum_.add_(to_device(saved.attn_out_sum, attn_out_sum_.sizes(), device));
  count_q_ += saved.count_q;
  count_kv_ += saved.count_kv;
}

LayerStatistics MomentCollector::result() const {
  LayerStatistics s = make_statistics(geometry_);
  const int layer = geometry_.layer_id;
  copy_out(q_moment_, s.q_moment, layer, "q_moment");
  copy_out(k_moment_, s.k_moment, layer, "k_moment");
  copy_out(v_moment_, s.v_moment, layer, "v_moment");
  copy_out(attn_out_moment_, s.attn_out_moment, layer, "attn_out_moment");
  copy_out(q_sum_, s.q_sum, layer, "q_sum");
  copy_out(k_sum_, s.k_sum, layer, "k_sum");
  copy_out(v_sum_, s.v_sum, layer, "v_sum");
  copy_out(attn_out_sum_, s.attn_out_sum, layer, "attn_out_sum");
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
