// Rows of attention to the sums of a layer.
#include "oscar/calibrate/collector.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/model/attention.h"
#include "oscar/model/device.h"
#include "oscar/model/torch.h"

namespace oscar {

// Float64 sums on their way between a device and the host.

inline torch::Tensor zero_sums(at::IntArrayRef shape, torch::Device device) {
  return torch::zeros(shape, torch::dtype(torch::kFloat64).device(device));
}

// Adds `values`, as many as `sum` has entries.
inline void add_values(torch::Tensor& sum, const std::vector<double>& values) {
  const auto host =
      torch::from_blob(const_cast<double*>(values.data()), sum.sizes(), torch::kFloat64);
  sum.add_(host.to(sum.device(), /*non_blocking=*/false, /*copy=*/true));
}

// Copies `sum` into as many `values`. Throws Error naming layer and sum when one is not finite. One
// thread looks through them: beside those that read weights, libtorch's may have to wait for a
// core.
inline void copy_values(const torch::Tensor& sum, std::vector<double>& values, int layer,
                        const char* name) {
  const torch::Tensor host = sum.to(torch::kCPU).contiguous();
  std::memcpy(values.data(), host.data_ptr<double>(), values.size() * sizeof(double));
  if (!std::ranges::all_of(values, [](double value) { return std::isfinite(value); })) {
    throw Error(
        {.what = "a statistic is not finite",
         .where = "layer " + std::to_string(layer) + ", " + name,
         .hint = "the weights or activations of this layer overflow; check the checkpoint"});
  }
}

// The same for moments [heads, d, d]: the upper triangles and their mirror images. The products
// that were added up are symmetric to the bit on some processors only. The host mirrors them:
// beside a forward pass, a kernel of the device would wait for the product in progress.
inline void copy_moments(const torch::Tensor& sum, std::vector<double>& values, int layer,
                         const char* name) {
  copy_values(sum, values, layer, name);
  const auto size = static_cast<size_t>(sum.size(1));
  for (auto matrix = values.begin(); matrix != values.end();
       matrix += static_cast<std::ptrdiff_t>(size * size)) {
    for (size_t row = 0; row < size; ++row) {
      for (size_t column = row; column < size; ++column) {
        const double entry = matrix[row * size + column] + 0.0;  // no -0
        matrix[row * size + column] = matrix[column * size + row] = entry;
      }
    }
  }
}

// The collectors: which tensors go into which sums.

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
  if (record.gate.defined()) {
    const std::array<RowSumsTask, 1> gates{{{record.gate, gate_sums(record.gate.device())}}};
    add_row_sums(gates);
  }
  if (attended_) attended_->observe(record);
  const int64_t tokens = record.k.size(0) * record.k.size(2);
  count_kv_ += tokens;
  count_q_ += tokens * (record.q.size(1) / record.k.size(1));
}

RowSums& MomentCollector::gate_sums(torch::Device device) {
  const int64_t heads = geometry_.num_qo_heads, d = geometry_.head_dim_v;
  if (!gate_) gate_ = RowSums{zero_sums({heads, d, d}, device), zero_sums({heads, d}, device)};
  return *gate_;
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
  if (!saved.gate_moment.empty()) {
    add_values(gate_sums(q_.moment.device()).moment, saved.gate_moment.data);
  }
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
  if (other.gate_) add_to(gate_sums(q_.moment.device()), *other.gate_);
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
  if (gate_) {
    s.gate_moment = make_gate_moment(geometry_);
    copy_moments(gate_->moment, s.gate_moment.data, layer, "gate_moment");
  }
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
  if (gate_) gate_->moment.zero_();
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

// What the rows of a sequence add to the sums.

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

int64_t attended_rows(torch::Device device) { return device.is_cuda() ? 16384 : 2048; }

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

// Collectors of all layers, kept for the whole run.

namespace {

bool is_one_of(const std::vector<int64_t>& marks, int64_t tokens) {
  return std::find(marks.begin(), marks.end(), tokens) != marks.end();
}

}  // namespace

// A layer's collector, the sums of the blocks before, and copies of all at the wanted token counts.
class MomentPass::Layer final : public AttentionObserver {
 public:
  // `before` begins at zero; none where `marks` has no blocks.
  Layer(MomentCollector block, std::optional<MomentCollector> before, SumMarks marks)
      : block_(std::move(block)), before_(std::move(before)), marks_(std::move(marks)) {}

  void observe(const AttentionRecord& record) override {
    block_.observe(record);
    tokens_ += record.k.size(0) * record.k.size(2);
    if (!is_one_of(marks_.block_tokens, tokens_)) return;
    before_->add(block_);
    block_.clear();
    copy_at_mark();
  }

  void restore_before(const LayerStatistics& saved) {
    before_->add(saved);
    tokens_ += saved.count_kv;
  }
  void restore_block(const LayerStatistics& saved) {
    if (is_one_of(marks_.block_tokens, saved.count_kv) && tokens_before() == 0) {
      return restore_before(saved);
    }
    block_.add(saved);
    tokens_ += saved.count_kv;
  }
  void restore_snapshot(std::shared_ptr<const LayerStatistics> snapshot) {
    snapshots_.push_back(std::move(snapshot));
  }

  LayerStatistics result() const {
    if (tokens_before() == 0) return sums_of(block_);
    LayerStatistics sum = sums_of(*before_);
    if (tokens_before() < tokens_) add_statistics(sum, sums_of(block_));
    return sum;
  }
  LayerStatistics block() const {
    const bool at_end = tokens_before() > 0 && tokens_before() == tokens_;
    return sums_of(at_end ? *before_ : block_);
  }
  const SumSnapshots& snapshots() const { return snapshots_; }
  // Null where block() is everything.
  std::shared_ptr<const LayerStatistics> before() const {
    if (tokens_before() == 0 || tokens_before() == tokens_) return nullptr;
    return std::make_shared<const LayerStatistics>(sums_of(*before_));
  }

 private:
  static LayerStatistics sums_of(const MomentCollector& collector) {
    LayerStatistics sums = collector.result();
    sums.o_proj_metric = {};
    return sums;
  }
  int64_t tokens_before() const { return before_ ? before_->count_kv() : 0; }
  void copy_at_mark() {
    if (!is_one_of(marks_.snapshot_tokens, tokens_)) return;
    snapshots_.push_back(std::make_shared<const LayerStatistics>(sums_of(*before_)));
  }

  MomentCollector block_;
  std::optional<MomentCollector> before_;
  SumMarks marks_;
  int64_t tokens_ = 0;
  SumSnapshots snapshots_;
};

MomentPass::MomentPass(const Transformer& model, const std::vector<LayerGeometry>& layers,
                       SavePoint save, const SumMarks& marks,
                       const std::optional<CacheView>& attended)
    : model_(model), layers_(layers), save_(std::move(save)) {
  const torch::Device device = model.compute().device;
  for (const LayerGeometry& geometry : layers_) {
    if (!geometry.fitted()) {
      collectors_.push_back(nullptr);
      continue;
    }
    const auto collector = [&] {
      std::optional<AttendedCollector> by_attention;
      if (attended && geometry.quantized) {
        by_attention.emplace(geometry, model.config().rope, *attended, device);
      }
      return MomentCollector(geometry, device, std::move(by_attention));
    };
    SumMarks own = marks;
    if (!geometry.quantized) own.snapshot_tokens.clear();
    std::optional<MomentCollector> before;
    if (!own.block_tokens.empty()) before.emplace(collector());
    collectors_.push_back(std::make_unique<Layer>(collector(), std::move(before), std::move(own)));
  }
}

MomentPass::~MomentPass() = default;

void MomentPass::restore(const std::vector<LayerStatistics>& block, const SumSnapshots& before,
                         SumSnapshots snapshots) {
  const auto collector_of = [this](const LayerGeometry& geometry) -> Layer* {
    const auto id = static_cast<size_t>(geometry.layer_id);
    if (id < layers_.size() && geometry == layers_[id]) return collectors_[id].get();
    throw Error({.what = "saved sums have another shape than the model's layer",
                 .where = fmt::format("layer {}", geometry.layer_id),
                 .hint = "delete the checkpoint and start anew"});
  };
  for (const auto& layer : before) {
    if (Layer* const collector = collector_of(layer->geometry)) collector->restore_before(*layer);
  }
  for (const LayerStatistics& layer : block) {
    Layer* const collector = collector_of(layer.geometry);
    if (collector) collector->restore_block(layer);
    const bool has_metric = !collector || !layer.o_proj_metric.empty();
    if (has_metric && static_cast<size_t>(layer.geometry.layer_id) == metrics_.size()) {
      metrics_.push_back(layer.o_proj_metric);
    }
  }
  for (auto& copy : snapshots) {
    if (Layer* const collector = collector_of(copy->geometry)) {
      collector->restore_snapshot(std::move(copy));
    }
  }
}

AttentionObserver* MomentPass::observer(int layer) {
  return collectors_[static_cast<size_t>(layer)].get();
}

void MomentPass::layer_done(const RunPosition& next) {
  if (save_) save_(*this, next);
}

template <typename Copy>
void MomentPass::copy_side_by_side(const Copy& copy) const {
  const auto stream = present_stream(model_.compute().device);
  parallel_for(static_cast<int64_t>(collectors_.size()), [&](int64_t index) {
    const InferenceOn scope(stream);
    const auto layer = static_cast<size_t>(index);
    if (collectors_[layer]) copy(layer, *collectors_[layer]);
  });
}

std::vector<LayerStatistics> MomentPass::copied(SumsOfLayer sums) const {
  std::vector<LayerStatistics> statistics(collectors_.size());
  copy_side_by_side([&](size_t i, const Layer& layer) { statistics[i] = (layer.*sums)(); });
  for (size_t i = 0; i < statistics.size(); ++i) statistics[i].geometry = layers_[i];
  return statistics;
}

std::vector<LayerStatistics> MomentPass::with_metrics(
    std::vector<LayerStatistics> statistics) const {
  for (size_t i = 0; i < statistics.size(); ++i) {
    if (i == metrics_.size()) {
      const bool local = collectors_[i] == nullptr;
      metrics_.push_back(local ? MatrixStack<double>() : model_.o_proj_metric(static_cast<int>(i)));
    }
    statistics[i].o_proj_metric = metrics_[i];
  }
  return statistics;
}

std::vector<LayerStatistics> MomentPass::result() const {
  return with_metrics(copied(&Layer::result));
}

std::vector<LayerStatistics> MomentPass::block() const {
  return with_metrics(copied(&Layer::block));
}

std::vector<LayerStatistics> MomentPass::block_sums() const {
  std::vector<LayerStatistics> sums = copied(&Layer::block);
  std::erase_if(sums, [](const LayerStatistics& layer) { return !layer.geometry.fitted(); });
  return sums;
}

SumSnapshots MomentPass::blocks_before() const {
  SumSnapshots all(collectors_.size());
  copy_side_by_side([&](size_t i, const Layer& layer) { all[i] = layer.before(); });
  std::erase(all, nullptr);
  return all;
}

SumSnapshots MomentPass::snapshots() const {
  SumSnapshots all;
  for (const auto& layer : collectors_) {
    if (layer) all.insert(all.end(), layer->snapshots().begin(), layer->snapshots().end());
  }
  return all;
}

MatrixStack<double> gated_metric(const MatrixStack<double>& heads,
                                 const MatrixStack<double>& gate_moment, int64_t tokens,
                                 int num_kv_heads) {
  MatrixStack<double> metric(num_kv_heads, heads.rows, heads.cols);
  const size_t matrix = metric.data.size() / static_cast<size_t>(num_kv_heads);
  const size_t group = heads.data.size() / metric.data.size();
  for (size_t i = 0; i < heads.data.size(); ++i) {
    const size_t head = i / matrix / group;
    metric.data[head * matrix + i % matrix] +=
        heads.data[i] * gate_moment.data[i] / static_cast<double>(tokens);
  }
  return metric;
}

void add_gates_to_metrics(const Transformer& model, std::vector<LayerStatistics>& statistics) {
  for (LayerStatistics& layer : statistics) {
    if (layer.gate_moment.empty()) continue;
    layer.o_proj_metric =
        gated_metric(model.o_proj_head_metrics(layer.geometry.layer_id), layer.gate_moment,
                     layer.count_kv, layer.geometry.num_kv_heads);
  }
}

void check_counts(const std::vector<LayerStatistics>& statistics, int64_t tokens) {
  for (const LayerStatistics& layer : statistics) {
    if (!layer.geometry.fitted() || layer.count_kv == tokens) continue;
    throw Error({.what = "the sums do not hold every token exactly once",
                 .where = fmt::format("layer {}, count_kv", layer.geometry.layer_id),
                 .expected = std::to_string(tokens),
                 .found = std::to_string(layer.count_kv),
                 .hint = "delete the checkpoint beside the output and start anew"});
  }
}

EnergyPass::EnergyPass(const std::vector<LayerStatistics>& statistics, torch::Device device) {
  for (const LayerStatistics& layer : statistics) {
    if (!layer.geometry.fitted()) {
      collectors_.emplace_back();
      continue;
    }
    MatrixStack<double> covariance = layer.q_moment;
    for (double& entry : covariance.data) entry /= static_cast<double>(layer.count_q);
    collectors_.emplace_back(std::in_place, layer.geometry, covariance, device);
  }
}

AttentionObserver* EnergyPass::observer(int layer) {
  auto& collector = collectors_[static_cast<size_t>(layer)];
  return collector ? &*collector : nullptr;
}

void EnergyPass::store(std::vector<LayerStatistics>& statistics) const {
  for (size_t i = 0; i < statistics.size(); ++i) {
    if (collectors_[i]) statistics[i].v_energy_moment = collectors_[i]->result();
  }
}

}  // namespace oscar
