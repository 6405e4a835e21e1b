// Held-back chunks of one layer in memory at a time.
#include "oscar/search/pass.h"

#include <algorithm>

#include "oscar/base/interrupt.h"
#include "oscar/data/document_order.h"
#include "oscar/fit/position_average.h"
#include "oscar/model/attention.h"
#include "oscar/model/side_stream.h"

namespace oscar {

static_assert(kSearchStreams + kMostLayersTogether <= kSideStreams);

std::vector<int64_t> placement_offsets(int64_t span, size_t count, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<int64_t> offsets;
  constexpr uint64_t kSteps = uint64_t{1} << 32;
  for (size_t i = 0; i < count; ++i) {
    const double within = static_cast<double>(random.below(kSteps)) / static_cast<double>(kSteps);
    const double share = (static_cast<double>(i) + within) / static_cast<double>(count);
    offsets.push_back(static_cast<int64_t>(served_position(share, span)));
  }
  return offsets;
}

// Collects what a layer's attention saw, a chunk at a time, placed at its offset.
class SearchPass::Buffer final : public AttentionObserver {
 public:
  Buffer(const Rope& rope, std::vector<int64_t> search, std::vector<int64_t> confirm)
      : rope_(rope), search_(std::move(search)), confirm_(std::move(confirm)) {}

  void observe(const AttentionRecord& record) override {
    for (int64_t i = 0; i < record.q.size(0); ++i, ++seen_) {
      const bool searching = seen_ < search_.size();
      const int64_t moved = searching ? search_[seen_] : confirm_.at(seen_ - search_.size());
      const auto offset = torch::tensor({moved});
      (searching ? held_.search : held_.confirm)
          .push_back({move_positions(record.q[i], rope_, offset),
                      move_positions(record.k[i], rope_, offset), record.v[i].to(torch::kFloat32),
                      record.first_position + moved});
    }
  }

  // What was collected; the next layer begins afresh.
  HeldBackLayer take() {
    seen_ = 0;
    return std::move(held_);
  }

 private:
  const Rope& rope_;
  std::vector<int64_t> search_, confirm_;
  size_t seen_ = 0;
  HeldBackLayer held_;
};

SearchPass::SearchPass(const Transformer& model, const std::vector<LayerStatistics>& statistics,
                       SearchSettings settings, size_t num_search, size_t num_confirm,
                       int layers_together, std::vector<bool> own_layers)
    : model_(model),
      statistics_(statistics),
      settings_(std::move(settings)),
      buffer_(std::make_unique<Buffer>(
          model.config().rope,
          placement_offsets(settings_.fit.position_span, num_search, settings_.seed),
          placement_offsets(settings_.fit.position_span, num_confirm, ~settings_.seed))),
      layers_together_(std::clamp(layers_together, 1, kMostLayersTogether)),
      own_layers_(std::move(own_layers)) {}

SearchPass::~SearchPass() = default;

LayerDecision SearchPass::search(size_t layer, const HeldBackLayer& held) const {
  const Rope& rope = model_.config().rope;
  const LayerStatistics& statistics = statistics_[layer];
  const auto output_metric =
      to_tensor(model_.o_proj_head_metrics(statistics.geometry.layer_id), model_.compute().device);
  return search_layer({.statistics = statistics,
                       .fixed = settings_.fit,
                       .search = settings_.search,
                       .rope = rope,
                       .quantizer = settings_.quantizer,
                       .sm_scale = model_.config().sm_scale,
                       .seed = settings_.seed,
                       .output_metric = output_metric},
                      held);
}

void SearchPass::finish_oldest() {
  Searching& oldest = searching_.front();
  decisions_[oldest.layer] = oldest.decision.get();
  searching_.pop_front();
}

void SearchPass::begin_search(size_t layer, HeldBackLayer held) {
  const torch::Device device = model_.compute().device;
  wait_for_stream(device);  // what was observed is there
  const int slot = begun_++ % kMostLayersTogether;
  auto searched =
      std::async(std::launch::async, [this, layer, device, slot, held = std::move(held)]() mutable {
        const c10::Stream stream = side_stream(device, kSearchStreams + slot);
        const InferenceOn guard(stream);
        const HeldBackLayer own = std::move(held);  // freed with the search
        LayerDecision decision = search(layer, own);
        stream.synchronize();
        return decision;
      });
  searching_.push_back({layer, std::move(searched)});
}

std::vector<LayerDecision> SearchPass::take_decisions() {
  while (!searching_.empty()) finish_oldest();
  return std::move(decisions_);
}

AttentionObserver* SearchPass::observer(int layer) {
  const auto index = static_cast<size_t>(layer);
  if (!owns(index) || !statistics_[index].geometry.quantized) return nullptr;
  // What is observed counts as the search's that follows.
  while (searching_.size() >= static_cast<size_t>(layers_together_)) finish_oldest();
  return buffer_.get();
}

void SearchPass::layer_done(const RunPosition&) {
  const size_t layer = decisions_.size();
  decisions_.emplace_back();
  if (!owns(layer)) return;
  const LayerStatistics& statistics = statistics_[layer];
  if (!statistics.geometry.quantized) {
    decisions_[layer] = fit_without_search(statistics, settings_.fit, model_.config().rope);
    return;
  }
  HeldBackLayer held = buffer_->take();
  // Searching a layer takes far longer than observing it: a request to stop does not wait for it.
  stop_if_requested();
  if (model_.compute().device.is_cuda()) {
    begin_search(layer, std::move(held));
  } else {
    decisions_[layer] = search(layer, held);
  }
}

}  // namespace oscar
