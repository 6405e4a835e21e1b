// A small layer to search: its geometry, sequences of random rows, and their statistics.
#pragma once

#include <vector>

#include "oscar/calibrate/collector.h"
#include "oscar/calibrate/search/search.h"

namespace oscar::search_case {

inline constexpr int kHeads = 2, kGroup = 2, kDim = 32;
inline constexpr int64_t kTokens = 300;
inline constexpr LayerGeometry kGeometry{.layer_id = 1,
                                         .attention = AttentionKind::kFull,
                                         .sliding_window = 0,
                                         .num_qo_heads = kHeads * kGroup,
                                         .num_kv_heads = kHeads,
                                         .head_dim_k = kDim,
                                         .head_dim_v = kDim,
                                         .quantized = true};
inline const CacheFormat kQuantizer{
    .quant_group_size = kDim, .sink_tokens = 4, .recent_tokens = 16};

inline HeldSequence random_sequence(uint64_t seed, int64_t tokens = kTokens) {
  torch::manual_seed(seed);
  return {torch::randn({kHeads * kGroup, tokens, kDim}), torch::randn({kHeads, tokens, kDim}),
          torch::randn({kHeads, tokens, kDim})};
}

// Keys far from zero mean, and channels of unequal size that queries weigh the other way round:
// what centering, the balanced transform and shaped rounding are for.
inline HeldSequence planted_sequence(uint64_t seed) {
  HeldSequence sequence = random_sequence(seed);
  const auto scale = torch::linspace(-1.5, 1.5, kDim).exp();
  sequence.k.mul_(scale).add_(3.0f);
  sequence.q.div_(scale);
  sequence.v.mul_(scale);
  return sequence;
}

inline torch::Tensor output_metric() {
  torch::manual_seed(5);
  const auto w = torch::randn({kHeads * kGroup, kDim, 48});
  return torch::matmul(w, w.transpose(1, 2));
}

inline LayerStatistics statistics_of(const std::vector<HeldSequence>& sequences) {
  MomentCollector collector(kGeometry, torch::kCPU);
  for (const HeldSequence& c : sequences) {
    collector.observe({.layer = 1,
                       .q = c.q.unsqueeze(0),
                       .k = c.k.unsqueeze(0),
                       .v = c.v.unsqueeze(0),
                       .o = c.q.unsqueeze(0)});
  }
  LayerStatistics s = collector.result();
  const auto metric = output_metric().view({kHeads, kGroup, kDim, kDim}).sum(1);
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kDim * kDim; ++i) {
      s.o_proj_metric[h].data()[i] = metric[h].contiguous().data_ptr<float>()[i];
    }
  }
  return s;
}

// Every query of `sequences` behind the windows.
inline HeldBackHalf all_queries(const std::vector<HeldSequence>& sequences) {
  return HeldBackHalf::all_queries(sequences, {.quantizer = kQuantizer,
                                               .layer = kGeometry.layer_id,
                                               .sm_scale = 1 / std::sqrt(double{kDim}),
                                               .output_metric = output_metric()});
}

// All heads of a side of a layer.
inline Candidate as_candidate(const SideTransform& side) {
  Candidate candidate;
  for (int head = 0; head < side.forward.count; ++head) {
    candidate.push_back(
        {.fit = &side, .head = head, .recipe = side.recipe[static_cast<size_t>(head)]});
  }
  return candidate;
}

// Their losses on every query with both sides INT2: pair i is that of layers[i].
inline LossTable losses_of(const std::vector<const LayerTransforms*>& layers,
                           const std::vector<HeldSequence>& sequences) {
  Candidates keys, values;
  std::vector<CandidatePair> pairs;
  for (const LayerTransforms* layer : layers) {
    pairs.push_back({static_cast<int>(keys.size()), static_cast<int>(keys.size())});
    keys.push_back(as_candidate(layer->key));
    values.push_back(as_candidate(layer->value));
  }
  return all_queries(sequences).losses(keys, values, pairs);
}

// With its inputs, which the search only refers to.
struct Search {
  FitOptions fixed;
  SearchOptions options;
  HeldBackLayer held;
  torch::Device device = torch::kCPU;  // that computes
  LayerStatistics statistics =
      statistics_of({random_sequence(1), random_sequence(2), random_sequence(3)});
  Rope rope;

  LayerDecision run() const {
    return search_layer({.statistics = statistics,
                         .fixed = fixed,
                         .search = options,
                         .rope = rope,
                         .quantizer = kQuantizer,
                         .sm_scale = 1 / std::sqrt(double{kDim}),
                         .seed = 7,
                         .output_metric = output_metric().to(device)},
                        {on_device(held.search), on_device(held.confirm)});
  }

 private:
  std::vector<HeldSequence> on_device(const std::vector<HeldSequence>& sequences) const {
    std::vector<HeldSequence> moved;
    for (const HeldSequence& c : sequences) {
      moved.push_back({c.q.to(device), c.k.to(device), c.v.to(device)});
    }
    return moved;
  }
};

// Hadamard at .96 on rows that no transform helps.
inline Search random_search() {
  Search search;
  search.fixed = {.kind = TransformKind::kHadamard, .clip_k = 0.96, .clip_v = 0.96};
  search.held.search = {random_sequence(10), random_sequence(11)};
  search.held.confirm = {random_sequence(12), random_sequence(13)};
  return search;
}

}  // namespace oscar::search_case
