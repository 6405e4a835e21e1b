// Sums of products of the observer's own tensors, in float64 but for short exact-product blocks.
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

// On a GPU, bf16 rows are multiplied in blocks of kBlockRows by the tensor cores: products of bf16
// numbers are exact in fp32, and so few additions cost under 2^-20. kBlocksTogether blocks are then
// added in fp32 and the rest in float64, so that little of the work touches 8-byte numbers. Held to
// 1e-6 of a float64 recomputation by tests/calibrate/gpu.
constexpr int64_t kBlockRows = 128, kBlocksTogether = 16;

struct RowSums {
  torch::Tensor moment;  // [d, d] float64, x^T x
  torch::Tensor sum;     // [d] float64
};

RowSums float64_sums(const torch::Tensor& rows) {
  const torch::Tensor exact = rows.to(torch::kFloat64);
  return {torch::mm(exact.t(), exact), exact.sum(0)};
}

// Sum over the first dimension of fp32 `partial` [blocks, ...], float64.
torch::Tensor add_up(const torch::Tensor& partial) {
  const int64_t together = partial.size(0) / kBlocksTogether * kBlocksTogether;
  torch::Tensor total =
      partial.narrow(0, together, partial.size(0) - together).sum(0, false, torch::kFloat64);
  if (together > 0) {
    total += partial.narrow(0, 0, together)
                 .unflatten(0, {together / kBlocksTogether, kBlocksTogether})
                 .sum(1)
                 .sum(0, /*keepdim=*/false, torch::kFloat64);
  }
  return total;
}

// `rows` [n, d] bf16 on a GPU, n a multiple of kBlockRows.
RowSums blocked_sums(const torch::Tensor& rows) {
  const torch::Tensor blocks = rows.reshape({-1, kBlockRows, rows.size(1)});
  return {add_up(at::bmm(blocks.transpose(1, 2), blocks, torch::kFloat32)),
          add_up(blocks.sum(1, /*keepdim=*/false, torch::kFloat32))};
}

// Adds sum of x^T x and sum of x of one batch, a head at a time so that intermediates of a long
// context stay small.
void accumulate(torch::Tensor& moment, torch::Tensor& sum, const torch::Tensor& x) {
  const int64_t heads = moment.size(0);
  const torch::Tensor rows = rows_by_kv_head(x, heads);
  const bool tensor_cores = x.is_cuda() && x.scalar_type() == torch::kBFloat16;
  const int64_t count = rows.size(1), blocked = tensor_cores ? count / kBlockRows * kBlockRows : 0;
  for (int64_t h = 0; h < heads; ++h) {
    const auto add = [&](const RowSums& part) {
      moment[h].add_(part.moment);
      sum[h].add_(part.sum);
    };
    if (blocked > 0) add(blocked_sums(rows[h].narrow(0, 0, blocked)));
    if (blocked < count) add(float64_sums(rows[h].narrow(0, blocked, count - blocked)));
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
