// One probe of a sequence's sampled queries for all methods that share windows.
#include "oscar/eval/layer_errors.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

#include "oscar/base/error.h"
#include "oscar/eval/observe_layers.h"
#include "oscar/int2/attention_probe.h"

namespace oscar {
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

// Adds the losses [Hkv, queries] of each head, over all queries.
void add_heads(const torch::Tensor& losses, std::vector<double>& heads) {
  const auto sums = losses.sum(1).to(torch::kCPU).contiguous();
  for (size_t h = 0; h < heads.size(); ++h) heads[h] += sums.data_ptr<double>()[h];
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
    int64_t first_of_probe = -1;
    for (size_t m = 0; m < methods_.size(); ++m) {
      const LayerCodec* const codec = methods_[m].layers[static_cast<size_t>(record.layer)].get();
      if (!codec || methods_[m].codec_off) continue;
      CacheView view = methods_[m].view;
      view.sliding_window = model_.config().geometry(record.layer, 0).sliding_window;
      // Methods that differ in windows read other keys as INT2.
      const int64_t first = view.sink + view.recent;
      if (first >= q.size(1)) continue;
      if (!probe || first != first_of_probe || view.sink != sink_of_probe_) {
        const auto positions = evenly_spaced(first, q.size(1), kLayerErrorQueries);
        probe.emplace(view, positions,
                      q.index_select(1, torch::tensor(positions, torch::kInt64).to(q.device())), k,
                      v, metric, record.sm_scale);
        first_of_probe = first;
        sink_of_probe_ = view.sink;
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
  int64_t sink_of_probe_ = -1;
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
