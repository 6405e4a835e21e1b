// The pass over held-back chunks: each layer is fitted and searched as soon as it has been
// observed.
#pragma once

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

class SearchPass final : public LayerVisitor {
 public:
  // The observed corpus is the `num_search` chunks of the search half, then those of the
  // confirmation half. `statistics`: one per layer, of the other chunks.
  SearchPass(const Transformer& model, const std::vector<LayerStatistics>& statistics,
             SearchSettings settings, size_t num_search, size_t num_confirm);
  ~SearchPass() override;

  AttentionObserver* observer(int layer) override;
  // Searches the layer; throws Interrupted instead when a stop was requested.
  void layer_done(const RunPosition& next) override;

  // One per layer, once all are done.
  std::vector<LayerDecision> take_decisions() { return std::move(decisions_); }

 private:
  class Buffer;

  void start_fits(size_t layer);
  VariantFits take_fits(size_t layer);

  const Transformer& model_;
  const std::vector<LayerStatistics>& statistics_;
  const SearchSettings settings_;
  std::unique_ptr<Buffer> buffer_;
  std::vector<LayerDecision> decisions_;
  std::future<VariantFits> next_fits_;
};

}  // namespace oscar
