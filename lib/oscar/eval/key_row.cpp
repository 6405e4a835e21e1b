// An observer that keeps one row of the layer whose keys stand out most so far.
#include "oscar/eval/key_row.h"

#include <algorithm>
#include <cmath>

#include "oscar/eval/observe_layers.h"
#include "oscar/inspect/picture.h"

namespace oscar {
namespace {

constexpr int64_t kRowsLookedAt = 256;  // 2-bit rows that are looked at

// Whether the method writes keys of `layer` in 2 bits; variants are left to their base.
bool has_int2_keys(const Method& method, int layer) {
  const auto& codec = method.layers[static_cast<size_t>(layer)];
  return codec && codec->int2_keys && !method.codec_off &&
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

}  // namespace oscar
