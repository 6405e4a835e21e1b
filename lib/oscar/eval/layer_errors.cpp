// Errors of attention outputs by layer and KV head, and by kind of row.
#include "oscar/eval/layer_errors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>

#include "oscar/attention/attention_probe.h"
#include "oscar/attention/int2_attention.h"
#include "oscar/attention/received_attention.h"
#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/bundle/coverage.h"
#include "oscar/model/layer_major.h"
#include "oscar/model/transformer.h"

namespace oscar {

// One pass of the reference over a few rows, for what looks at each layer's queries, keys and
// values.

// Runs ids [sequences, tokens] through all layers from position `position_offset` on; `observer`
// sees each. Throws Interrupted when a stop was requested.
void observe_layers(Transformer& model, const torch::Tensor& ids, int64_t position_offset,
                    AttentionObserver& observer);

// Layer by layer.

void observe_layers(Transformer& model, const torch::Tensor& ids, int64_t position_offset,
                    AttentionObserver& observer) {
  auto hidden = model.embed(ids);
  LayerLoader loader(model, /*resident=*/false);
  for (int layer = 0; layer < model.config().num_layers; ++layer) {
    stop_if_requested(kStoppedEvaluation);
    hidden =
        model.forward_layer(layer, loader.get(layer), hidden, &observer, nullptr, position_offset);
  }
}

// Rows of a few sequences, layer by layer, by class.

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
      if (!codec || methods_[m].rival) continue;
      CacheView view = methods_[m].view;
      view.sliding_window = model_.config().geometry(record.layer, 0).sliding_window;
      if (!received_.attention.defined() || i != sequence_ || record.layer != layer_) {
        begin(record, i, q, k, view);
      }
      if (received_.queries.empty()) return;
      if (codec->int2_keys) add_key_errors(*codec, q, k, view, record.first_position, m);
      if (codec->int2_values) add_value_errors(*codec, v, record, i, m);
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

  void add_value_errors(const LayerCodec& codec, const torch::Tensor& v,
                        const AttentionRecord& record, int64_t i, size_t m) {
    const auto exact = to_cache_basis(codec.value, v.unsqueeze(0));
    const auto error = torch::matmul(quantize_dequantize(codec.value, exact, "row classes") - exact,
                                     codec.value.partner)[0];
    if (metric_layer_ != record.layer) {
      heads_metric_ = to_tensor(model_.o_proj_head_metrics(record.layer), v.device());
      metric_ = heads_metric_.unflatten(0, {v.size(0), -1}).sum(1);
      metric_layer_ = record.layer;
    }
    if (record.gate.defined()) {  // of this sequence (math 1.2)
      const auto s = record.gate[i].to(torch::kFloat32);
      const auto gates = torch::matmul(s.transpose(1, 2), s) / s.size(1);
      metric_ = (heads_metric_ * gates).unflatten(0, {v.size(0), -1}).sum(1);
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
  torch::Tensor heads_metric_, metric_;  // [Hq, d, d], [Hkv, d, d]
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
  if (std::accumulate(sums.rows.begin(), sums.rows.end(), 0.0) == 0) return nullptr;
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

// An observer that keeps one row of the layer whose keys stand out most so far.

namespace {

constexpr int64_t kRowsLookedAt = 256;  // 2-bit rows that are looked at

// Whether the method writes keys of `layer` in 2 bits; variants are left to their base.
bool has_int2_keys(const Method& method, int layer) {
  const auto& codec = method.layers[static_cast<size_t>(layer)];
  return codec && codec->int2_keys && !method.codec_off && !method.rival &&
         method.name.find('@') == std::string::npos;
}

class KeyRowObserver final : public AttentionObserver {
 public:
  KeyRowObserver(const ModelConfig& config, const std::vector<Method>& methods)
      : config_(config), methods_(methods) {}

  void observe(const AttentionRecord& record) override {
    const auto first = std::ranges::find_if(
        methods_, [&](const Method& m) { return has_int2_keys(m, record.layer); });
    if (first == methods_.end()) return;
    const LayerGeometry geometry =
        config_.geometry(record.layer, static_cast<int>(first->view.recent));
    if (!geometry.quantized) return;
    CacheView view = first->view;
    view.mode = CacheModeKind::kDecode;
    const auto k = record.k[0].to(torch::kFloat32);  // [Hkv, tokens, d]
    const int64_t end = int2_end(view, k.size(1) - 1);
    if (end <= view.sink) return;

    const auto channels = k.slice(1, view.sink, end).square().mean(1).sqrt();  // [Hkv, d]
    const auto peaks = channels.amax(1) / channels.quantile(0.5, 1);
    const auto head = peaks.argmax().item<int64_t>();
    const double peak = peaks[head].item<double>();
    if (!std::isfinite(peak) || peak <= row_.peak) return;
    row_ = {.layer = record.layer,
            .head = static_cast<int>(head),
            .token = view.sink + (end - view.sink) / 2,
            .peak = peak,
            .written = {},
            .cached = {}};
    row_.written = k[head][row_.token].cpu();
    for (size_t m = 0; m < methods_.size(); ++m) {
      if (has_int2_keys(methods_[m], record.layer)) add_cached(m, k, record.first_position, view);
    }
  }

  std::optional<KeyRow> result() const {
    return row_.peak > 0 ? std::optional(row_) : std::nullopt;
  }

 private:
  void add_cached(size_t m, const torch::Tensor& k, int64_t first_position, const CacheView& view) {
    const SideCodec& codec = methods_[m].layers[static_cast<size_t>(row_.layer)]->key;
    const auto rows = to_cache_basis(codec, k.unsqueeze(0));
    const auto runs = segment_runs(codec, {0, first_position, view.sink}, k.size(1));
    const auto read = quantize_dequantize(codec, rows, "key row", runs);
    row_.cached.push_back(
        {m, rows[0][row_.head][row_.token].cpu(), read[0][row_.head][row_.token].cpu()});
  }

  const ModelConfig& config_;
  const std::vector<Method>& methods_;
  KeyRow row_;
};

Json row_numbers(const torch::Tensor& row) {
  Json list = Json::array();
  for (int64_t i = 0; i < row.size(0); ++i) list.push_back(picture_number(row[i].item<double>()));
  return list;
}

}  // namespace

std::optional<KeyRow> measure_key_row(Transformer& model, const std::vector<Method>& methods,
                                      const std::vector<int32_t>& sequence,
                                      int64_t position_offset) {
  const c10::InferenceMode guard;
  int64_t windows = 0;
  for (const Method& m : methods) windows = std::max(windows, m.view.sink + m.view.recent);
  const int64_t tokens = std::min(static_cast<int64_t>(sequence.size()), windows + kRowsLookedAt);
  auto ids = torch::empty({1, tokens}, torch::kInt64);
  std::copy_n(sequence.begin(), tokens, ids.data_ptr<int64_t>());
  KeyRowObserver observer(model.config(), methods);
  observe_layers(model, ids, position_offset, observer);
  return observer.result();
}

void add_key_row(const KeyRow& row, const std::vector<Method>& methods, int64_t position_offset,
                 Json& report) {
  report["key_row"] = {{"layer", row.layer},
                       {"head", row.head},
                       {"position", row.token + position_offset},
                       {"peak", picture_number(row.peak)},
                       {"written", row_numbers(row.written)}};
  for (const KeyRow::Cached& cached : row.cached) {
    report["methods"][methods[cached.method].name]["key_row"] = {
        {"transformed", row_numbers(cached.transformed)},
        {"read_back", row_numbers(cached.read_back)}};
  }
}

// One probe of a sequence's sampled queries for all methods that share windows.

namespace {

// The middles of at most `count` equal strata of [first, last), ascending.
std::vector<int64_t> evenly_spaced(int64_t first, int64_t last, int64_t count) {
  const int64_t range = last - first;
  count = std::min(count, range);
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < count; ++i)
    positions.push_back(first + range * (2 * i + 1) / (2 * count));
  return positions;
}

// Rows [heads, tokens, d] of these tokens.
torch::Tensor at_positions(const torch::Tensor& rows, const std::vector<int64_t>& positions) {
  return rows.index_select(1, torch::tensor(positions, torch::kInt64).to(rows.device()));
}

// Adds the losses [Hkv, queries] of each head, over all queries.
void add_heads(const torch::Tensor& losses, std::vector<double>& heads) {
  const auto sums = losses.sum(1).to(torch::kCPU).contiguous();
  for (size_t h = 0; h < heads.size(); ++h) heads[h] += sums.data_ptr<double>()[h];
}

bool same_windows(const CacheView& a, const CacheView& b) {
  return a.sink == b.sink && a.recent == b.recent && a.demote_block == b.demote_block;
}

class LayerErrorObserver final : public AttentionObserver {
 public:
  LayerErrorObserver(const Transformer& model, const std::vector<Method>& methods,
                     std::vector<LayerErrorSums>& sums)
      : model_(model), methods_(methods), sums_(sums) {}

  void observe(const AttentionRecord& record) override {
    const auto metric = to_tensor(model_.o_proj_head_metrics(record.layer), record.q.device());
    for (int64_t i = 0; i < record.q.size(0); ++i) observe_sequence(record, i, metric);
  }

 private:
  void observe_sequence(const AttentionRecord& record, int64_t i, const torch::Tensor& metric) {
    const auto q = record.q[i], k = record.k[i], v = record.v[i];
    std::optional<AttentionProbe> probe;
    CacheView of_probe;
    for (size_t m = 0; m < methods_.size(); ++m) {
      const LayerCodec* const codec = methods_[m].layers[static_cast<size_t>(record.layer)].get();
      if (!codec || methods_[m].codec_off) continue;
      CacheView view = methods_[m].view;
      view.sliding_window = model_.config().geometry(record.layer, 0).sliding_window;
      // Methods that differ in windows read other keys as INT2.
      const int64_t first = view.sink + view.recent;
      if (first >= q.size(1)) continue;
      if (!probe || !same_windows(view, of_probe)) {
        const auto positions = evenly_spaced(first, q.size(1), kLayerErrorQueries);
        probe.emplace(view, positions, at_positions(q, positions), k, v, metric, record.sm_scale,
                      record.gate.defined()
                          ? at_positions(record.gate[i].to(torch::kFloat32), positions)
                          : torch::Tensor());
        of_probe = view;
      }
      add_errors(*probe, *codec, k, v, {0, record.first_position, view.sink},
                 static_cast<size_t>(record.layer), sums_[m]);
    }
  }

  static void add_errors(const AttentionProbe& probe, const LayerCodec& codec,
                         const torch::Tensor& k, const torch::Tensor& v, const RowPlaces& places,
                         size_t layer, LayerErrorSums& sums) {
    const std::string where = "layer " + std::to_string(layer) + ", layer errors";
    torch::Tensor weights = probe.exact_weights();
    add_heads(probe.energy(), sums.energy[layer]);
    if (codec.int2_keys) {
      const auto exact = to_cache_basis(codec.key, k.unsqueeze(0));
      const auto runs = segment_runs(codec.key, places, k.size(1));
      weights = probe.weights({quantize_dequantize(codec.key, exact, where, runs)[0],
                               codec.key.partner, codec.key.mean});
      add_heads(probe.loss(probe.key_error(weights)), sums.key[layer]);
    }
    if (!codec.int2_values) {
      sums.both[layer] = sums.key[layer];
      return;
    }
    const auto exact = to_cache_basis(codec.value, v.unsqueeze(0));
    const Int2Rows values{torch::matmul(quantize_dequantize(codec.value, exact, where) - exact,
                                        codec.value.partner)[0],
                          {},
                          {}};
    add_heads(probe.loss(probe.value_error(probe.int2_part(probe.exact_weights()), values)),
              sums.value[layer]);
    add_heads(probe.loss(probe.pair_error(weights, values)), sums.both[layer]);
  }

  const Transformer& model_;
  const std::vector<Method>& methods_;
  std::vector<LayerErrorSums>& sums_;
};

bool all_finite(const ByLayerAndHead& sums) {
  return std::ranges::all_of(sums, [](const std::vector<double>& heads) {
    return std::ranges::all_of(heads, [](double sum) { return std::isfinite(sum); });
  });
}

// Sums over energies; 0 for a head without energy.
Json shares(const ByLayerAndHead& sums, const ByLayerAndHead& energy) {
  Json layers = Json::array();
  for (size_t l = 0; l < energy.size(); ++l) {
    Json heads = Json::array();
    for (size_t h = 0; h < energy[l].size(); ++h) {
      heads.push_back(energy[l][h] > 0 ? sums[l][h] / energy[l][h] : 0.0);
    }
    layers.push_back(std::move(heads));
  }
  return layers;
}

}  // namespace

std::vector<LayerErrorSums> measure_layer_errors(Transformer& model,
                                                 const std::vector<Method>& methods,
                                                 const torch::Tensor& ids,
                                                 int64_t position_offset) {
  const c10::InferenceMode guard;
  const ByLayerAndHead none(
      static_cast<size_t>(model.config().num_layers),
      std::vector<double>(static_cast<size_t>(model.config().num_kv_heads), 0.0));
  std::vector<LayerErrorSums> sums(methods.size(), LayerErrorSums{none, none, none, none});
  LayerErrorObserver observer(model, methods, sums);
  observe_layers(model, ids, position_offset, observer);
  for (size_t m = 0; m < methods.size(); ++m) {
    const LayerErrorSums& of = sums[m];
    if (all_finite(of.key) && all_finite(of.value) && all_finite(of.both) &&
        all_finite(of.energy)) {
      continue;
    }
    throw Error({.what = "an error of the attention output is not finite",
                 .where = "method " + methods[m].name,
                 .hint = "the weights or activations of this model overflow"});
  }
  return sums;
}

void add_layer_errors(const std::vector<LayerErrorSums>& sums, const std::vector<Method>& methods,
                      Json& report) {
  for (size_t m = 0; m < methods.size(); ++m) {
    const LayerErrorSums& of = sums[m];
    const bool any = std::ranges::any_of(of.energy, [](const std::vector<double>& heads) {
      return std::ranges::any_of(heads, [](double energy) { return energy > 0; });
    });
    if (!any) continue;
    report["methods"][methods[m].name]["layer_errors"] = {{"key", shares(of.key, of.energy)},
                                                          {"value", shares(of.value, of.energy)},
                                                          {"both", shares(of.both, of.energy)}};
  }
}

}  // namespace oscar
