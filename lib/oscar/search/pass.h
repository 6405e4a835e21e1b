// The pass over held-back chunks: each layer is fitted and searched as soon as it has been
// observed.
#pragma once

#include <deque>
#include <future>
#include <vector>

#include "oscar/executor/layer_major.h"
#include "oscar/search/held_back.h"
#include "oscar/search/layer_search.h"

namespace oscar {

// Where each of `count` chunks is placed so that decisions hold at all served positions: one seeded
// offset in each of as many parts of [0, span] of equal weight (math 8.4).
std::vector<int64_t> placement_offsets(int64_t span, size_t count, uint64_t seed);

// What a search starts from, and what it may change.
struct SearchSettings {
  FitOptions fit;               // what is not searched, and what ties go to
  SearchOptions search;         // what of `fit` held-out loss may change
  QuantizerSettings quantizer;  // quant_group_size resolved
  uint64_t seed = 0;
};

// Layers that a GPU searches side by side at most: one alone is too small for it.
inline constexpr int kMostLayersTogether = 4;

class SearchPass final : public LayerVisitor {
 public:
  // The observed corpus is the `num_search` chunks of the search half, then those of the
  // confirmation half. `statistics`: one per layer, of the other chunks. On a GPU up to
  // `layers_together` are searched in threads of their own, with search_memory_bytes each, while
  // the next ones are observed; the decisions do not depend on how many. Layers that are not among
  // `own_layers` ([num_layers]; empty: all are) are neither observed nor decided.
  SearchPass(const Transformer& model, const std::vector<LayerStatistics>& statistics,
             SearchSettings settings, size_t num_search, size_t num_confirm,
             int layers_together = 1, std::vector<bool> own_layers = {});
  ~SearchPass() override;

  AttentionObserver* observer(int layer) override;
  // Searches the layer, or begins to; throws Interrupted instead when a stop was requested.
  void layer_done(const RunPosition& next) override;

  // One per layer, once all are done; empty where the layer is not an own one.
  std::vector<LayerDecision> take_decisions();

 private:
  class Buffer;

  bool owns(size_t layer) const { return own_layers_.empty() || own_layers_[layer]; }
  LayerDecision search(size_t layer, const HeldBackLayer& held) const;
  void begin_search(size_t layer, HeldBackLayer held);
  void finish_oldest();

  const Transformer& model_;
  const std::vector<LayerStatistics>& statistics_;
  const SearchSettings settings_;
  std::unique_ptr<Buffer> buffer_;
  const int layers_together_;
  const std::vector<bool> own_layers_;
  std::vector<LayerDecision> decisions_;  // of the layers done; empty while one is searched
  int begun_ = 0;                         // searches in threads of their own
  struct Searching {
    size_t layer;
    std::future<LayerDecision> decision;
  };
  std::deque<Searching> searching_;
};

}  // namespace oscar
