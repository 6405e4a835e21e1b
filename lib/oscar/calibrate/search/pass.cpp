// The layers of a model past the search, within its memory.
#include "oscar/calibrate/search/pass.h"

#include <ATen/Parallel.h>
#include <algorithm>

#include "oscar/base/process.h"
#include "oscar/calibrate/search/search.h"
#include "oscar/fit/moments.h"
#include "oscar/model/attention.h"
#include "oscar/model/device.h"
#include "oscar/text/corpus.h"

namespace oscar {

// The limits, and the sum of what they allow.

namespace {

constexpr SearchLimits kHost{.scores = int64_t{1} << 18,
                             .kept = int64_t{1} << 27,
                             .sequence_rows = 1,  // each sequence alone
                             .rows = int64_t{1} << 22};
constexpr SearchLimits kDevice{.scores = int64_t{1} << 24,
                               .kept = int64_t{1} << 29,
                               .sequence_rows = int64_t{1} << 24,
                               .rows = int64_t{1} << 27};

// Candidates of one side that are compared at a time where no transforms are: clipping ratios or
// writers, the present one included.
constexpr int64_t kSideCandidates = 6;

// Fits of the portable variants, made beside those of the main one; and the matrices of a side that
// each fit keeps.
constexpr int64_t kPortableFits = 4, kMatrices = 4;

// Matrices of d x d in float64 that making a fit takes at a time: of each head five moments, as
// they are and as they are fitted, and of the head at work roots, products and inverses.
constexpr int64_t kHeadMoments = 10, kFitMatrices = 10;

// Tensors as large as the rows that are quantized side by side: repeated, in the cache's basis,
// clipped, as numbers again, and the error.
constexpr int64_t kRowCopies = 5;

// Tensors as large as a part's scores: scores and weights, exact and of a candidate, the exponents
// and masks between them.
constexpr int64_t kScoreCopies = 6;

// Values of all heads of one token: query, key and value, and the gate where there is one.
int64_t row_values(const ModelConfig& config) {
  const int64_t queries = config.num_qo_heads * (config.has_output_gates() ? 2 : 1);
  return (queries + 2 * config.num_kv_heads) * config.head_dim;
}

}  // namespace

const SearchLimits& search_limits(torch::Device device) {
  return device.is_cuda() ? kDevice : kHost;
}

std::vector<MemoryNeed> search_needs(const ModelConfig& config, const HeldBackSize& held_back,
                                     const FitOptions& fixed, const SearchOptions& search,
                                     torch::Device device) {
  const SearchLimits& limits = search_limits(device);
  const auto of_main = static_cast<int64_t>(fit_requests(fixed, search).size());
  const int64_t num_fits = of_main + kPortableFits;
  const int64_t num_candidates = std::max(of_main, kSideCandidates);
  const int64_t side_of_token = int64_t{config.num_kv_heads} * config.head_dim;
  const int64_t rows = held_back.tokens * row_values(config);

  const int64_t batch = std::max(limits.sequence_rows, held_back.longest_sequence * side_of_token);
  const int64_t one_side = std::min(batch, held_back.tokens * side_of_token);
  const int64_t candidates = 2 * num_candidates * one_side;
  const int64_t together = std::min(std::max(limits.rows, one_side), candidates);

  const int64_t scores_of_query = int64_t{config.num_qo_heads} * held_back.longest_sequence;
  const int64_t queries = held_back.search_sequences * kSearchQueries;
  const int64_t kept = std::min(limits.kept, 2 * queries * scores_of_query);
  const int64_t part = std::max(limits.scores, kFewestTogether * scores_of_query);
  const int64_t parts = device.is_cuda() ? 1 : at::get_num_threads();
  // On the device that computes, and on the host where they were made.
  const int64_t matrix = int64_t{config.head_dim} * config.head_dim;
  const int64_t kept_fits = num_fits * 2 * kMatrices * config.num_kv_heads * matrix;
  const int64_t fits =
      device.is_cuda()
          ? kept_fits
          : 2 * kept_fits +
                num_fits * (kHeadMoments * config.num_kv_heads + kFitMatrices) * 2 * matrix;
  const auto need = [](const char* name, Moment moment, int64_t values) {
    return MemoryNeed{.name = name,
                      .moment = moment,
                      .compute_bytes = values * static_cast<int64_t>(sizeof(float))};
  };
  std::vector<MemoryNeed> needs = {
      need("fits of the search", Moment::kBetween, fits),
      need("rows held back for the search", Moment::kBetween, 2 * rows),
      need("rows of the search's candidates", Moment::kBetween, candidates + kRowCopies * together),
      need("scores of the search", Moment::kBetween, kept + kScoreCopies * part * parts)};
  // Where a layer is searched when no batch runs, its rows are collected while they do.
  if (!device.is_cuda()) {
    needs.push_back(need("rows held back for the search", Moment::kPassing, rows));
  }
  return needs;
}

// Held-back sequences of one layer in memory at a time.

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

// Collects what a layer's attention saw, a sequence at a time, placed at its offset.
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
          .push_back(
              {move_positions(record.q[i], rope_, offset),
               move_positions(record.k[i], rope_, offset), record.v[i].to(torch::kFloat32),
               record.first_position + moved,
               record.gate.defined() ? record.gate[i].to(torch::kFloat32) : torch::Tensor()});
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
  const int stream_number = begun_++ % kMostLayersTogether;
  auto searched = std::async(
      std::launch::async, [this, layer, device, stream_number, held = std::move(held)]() mutable {
        const c10::Stream stream = side_stream(device, kSearchStreams + stream_number);
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
