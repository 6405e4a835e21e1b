// Rows of a few sequences, layer by layer, by class.
#include "oscar/eval/row_classes.h"

#include <numeric>

#include "oscar/eval/observe_layers.h"
#include "oscar/int2/received_attention.h"

namespace oscar {
namespace {

// Which rows [Hkv, tokens] are of each class, float32.
using ClassMasks = std::array<torch::Tensor, kRowClasses>;

// The sum of [Hkv, tokens], of which torch would make partial sums by its number of threads.
double total(const torch::Tensor& values) {
  const auto host = values.to(torch::kCPU, torch::kFloat64).contiguous();
  return std::accumulate(host.data_ptr<double>(), host.data_ptr<double>() + host.numel(), 0.0);
}

// Adds to `to` what of `values` [Hkv, tokens] is of each class, as shares of `whole`.
void add_by_class(const torch::Tensor& values, const ClassMasks& masks, double whole,
                  ByRowClass& to) {
  if (!(whole > 0)) return;
  for (size_t c = 0; c < masks.size(); ++c) {
    to[c] += total(values * masks[c]) / whole;
  }
}

// [Hkv, tokens] e M e^T of rows e [Hkv, tokens, d] with M [Hkv, d, d].
torch::Tensor cost(const torch::Tensor& rows, const torch::Tensor& metric) {
  return (torch::matmul(rows, metric) * rows).sum(2);
}

class RowClassObserver final : public AttentionObserver {
 public:
  RowClassObserver(const Transformer& model, const std::vector<Method>& methods,
                   const torch::Tensor& separator, RowClassSums& sums)
      : model_(model), methods_(methods), separator_(separator), sums_(sums) {}

  void observe(const AttentionRecord& record) override {
    for (int64_t i = 0; i < record.q.size(0); ++i) {
      observe_sequence(record, i);
    }
  }

 private:
  void observe_sequence(const AttentionRecord& record, int64_t i) {
    const auto q = record.q[i], k = record.k[i], v = record.v[i];
    for (size_t m = 0; m < methods_.size(); ++m) {
      const LayerCodec* const codec = methods_[m].layers[static_cast<size_t>(record.layer)].get();
      if (!codec) continue;
      CacheView view = methods_[m].view;
      view.sliding_window = model_.config().geometry(record.layer, 0).sliding_window;
      if (!received_.attention.defined() || i != sequence_ || record.layer != layer_) {
        begin(record, i, q, k, view);
      }
      if (received_.queries.empty()) return;
      if (codec->int2_keys) add_key_errors(*codec, q, k, view, record.first_position, m);
      if (codec->int2_values) add_value_errors(*codec, v, record.layer, m);
    }
  }

  // What all methods share: windows are those of the first one.
  void begin(const AttentionRecord& record, int64_t i, const torch::Tensor& q,
             const torch::Tensor& k, const CacheView& view) {
    sequence_ = i;
    layer_ = record.layer;
    received_ = received_attention(q, k, view, record.sm_scale);
    const int64_t tokens = k.size(1);
    auto int2 = torch::zeros_like(received_.sink);
    int2.slice(1, view.sink, std::max(view.sink, int2_end(view, tokens - 1))).fill_(1);
    const auto separators = separator_[i].to(int2.device(), torch::kFloat32).unsqueeze(0) * int2;
    const auto sinks = received_.sink * (1 - separators);
    masks_ = {separators, sinks, int2 - separators - sinks};
    add_by_class(int2, masks_, total(int2), sums_.rows);
    add_by_class(received_.attention, masks_, total(received_.attention), sums_.attention);
  }

  void add_key_errors(const LayerCodec& codec, const torch::Tensor& q, const torch::Tensor& k,
                      const CacheView& view, int64_t first_position, size_t m) {
    const auto exact = to_cache_basis(codec.key, k.unsqueeze(0));
    const auto runs = segment_runs(codec.key, {0, first_position, view.sink}, k.size(1));
    const auto error = quantize_dequantize(codec.key, exact, "row classes", runs)[0] - exact[0];
    const auto sampled =
        q.index_select(1, torch::tensor(received_.queries, torch::kInt64).to(q.device()));
    const int64_t heads = k.size(0);
    const auto turned = to_query_basis(codec, sampled.unsqueeze(0))[0].reshape(
        {heads, -1, q.size(2)});  // [Hkv, query heads * queries, d]
    const auto weighted = turned * received_.query.view({heads, -1, 1});
    const auto metric = torch::matmul(weighted.transpose(1, 2), turned);
    const auto costs = cost(error, metric) * received_.key;
    // Of the whole weight and of a logit's square: a share of the softmax's own scale.
    const double whole = total(received_.query);
    add_by_class(costs, masks_, whole * whole, sums_.key_error[m]);
  }

  void add_value_errors(const LayerCodec& codec, const torch::Tensor& v, int layer, size_t m) {
    const auto exact = to_cache_basis(codec.value, v.unsqueeze(0));
    const auto error = torch::matmul(quantize_dequantize(codec.value, exact, "row classes") - exact,
                                     codec.value.partner)[0];
    if (metric_layer_ != layer) {
      metric_ = to_tensor(model_.o_proj_metric(layer), v.device());
      metric_layer_ = layer;
    }
    const auto rows = v.to(torch::kFloat32);
    const double energy = total(cost(rows, metric_) * received_.value);
    add_by_class(cost(error, metric_) * received_.value, masks_, energy, sums_.value_error[m]);
  }

  const Transformer& model_;
  const std::vector<Method>& methods_;
  torch::Tensor separator_;  // [sequences, tokens] bool
  RowClassSums& sums_;
  ReceivedAttention received_;
  ClassMasks masks_;
  int64_t sequence_ = -1;
  int layer_ = -1, metric_layer_ = -1;
  torch::Tensor metric_;
};

// Each entry's share of their sum; 0 without any.
Json shares(const ByRowClass& sums) {
  const double whole = std::accumulate(sums.begin(), sums.end(), 0.0);
  Json result = Json::object();
  for (int c = 0; c < kRowClasses; ++c) {
    result[row_class_name(static_cast<RowClass>(c))] =
        whole > 0 ? sums[static_cast<size_t>(c)] / whole : 0.0;
  }
  return result;
}

}  // namespace

const char* row_class_name(RowClass row_class) {
  constexpr const char* kNames[] = {"separators", "sinks", "others"};
  return kNames[static_cast<size_t>(row_class)];
}

RowClassSums measure_row_classes(Transformer& model, const std::vector<Method>& methods,
                                 const torch::Tensor& ids, const std::vector<int32_t>& separators,
                                 int64_t position_offset) {
  const c10::InferenceMode guard;
  RowClassSums sums;
  sums.key_error.resize(methods.size());
  sums.value_error.resize(methods.size());
  const auto is_separator = torch::isin(ids, torch::tensor(separators, torch::kInt64));
  RowClassObserver observer(model, methods, is_separator, sums);
  observe_layers(model, ids, position_offset, observer);
  return sums;
}

Json row_classes_json(const RowClassSums& sums, const std::vector<Method>& methods) {
  Json result = {{"rows", shares(sums.rows)}, {"attention", shares(sums.attention)}};
  for (size_t m = 0; m < methods.size(); ++m) {
    const auto any = [](const ByRowClass& errors) {
      return std::accumulate(errors.begin(), errors.end(), 0.0) > 0;
    };
    if (!any(sums.key_error[m]) && !any(sums.value_error[m])) continue;
    result["methods"][methods[m].name] = {{"key_error", shares(sums.key_error[m])},
                                          {"value_error", shares(sums.value_error[m])}};
  }
  return result;
}

}  // namespace oscar
