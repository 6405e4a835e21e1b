// The layers of a model past the search, within its memory.
#pragma once

#include <cstdint>
#include <deque>
#include <future>
#include <vector>

#include "oscar/calibrate/search/candidates.h"
#include "oscar/calibrate/search/search.h"
#include "oscar/fit/fit.h"
#include "oscar/model/checkpoint/config.h"
#include "oscar/model/layer_major.h"
#include "oscar/model/memory.h"
#include "oscar/model/torch.h"

namespace oscar {

// What bounds the memory of a search, and how much that is.

// Queries of a sequence that are looked at while searching.
inline constexpr int64_t kSearchQueries = 128;

// Queries that are looked at together at least.
inline constexpr int64_t kFewestTogether = 8;

// Limits that keep the memory of a search independent of corpus and model, where one sequence alone
// does not pass them. In float32 values.
struct SearchLimits {
  int64_t scores;         // of one part: a processor's cache, or enough to keep a GPU busy
  int64_t kept;           // scores and weights that are kept of a half
  int64_t sequence_rows;  // one side of the sequences of a batch
  int64_t rows;           // rows of all candidates that are quantized side by side
};
const SearchLimits& search_limits(torch::Device device);

// What is held back of a corpus for a search.
struct HeldBackSize {
  int64_t tokens = 0, search_sequences = 0, longest_sequence = 0;
};

// What a search needs beside the forward pass and the statistics: the rows of one layer that are
// held back, in float32 and once more as the halves hold them; fits and rows of all candidates;
// scores and weights that are kept; and what is being worked on.
std::vector<MemoryNeed> search_needs(const ModelConfig& config, const HeldBackSize& held_back,
                                     const FitOptions& fixed, const SearchOptions& search,
                                     torch::Device device);

// The pass over held-back sequences: each layer is fitted and searched as soon as it has been
// observed.

// Where each of `count` sequences is placed so that decisions hold at all served positions: one
// seeded offset in each of as many parts of [0, span] of equal weight (math 8.4).
std::vector<int64_t> placement_offsets(int64_t span, size_t count, uint64_t seed);

// What a search starts from, and what it may change.
struct SearchSettings {
  FitOptions fit;         // what is not searched, and what ties go to
  SearchOptions search;   // what of `fit` held-out loss may change
  CacheFormat quantizer;  // quant_group_size resolved
  uint64_t seed = 0;
};

// Layers that a GPU searches side by side at most: one alone is too small for it.
inline constexpr int kMostLayersTogether = 4;

class SearchPass final : public LayerVisitor {
 public:
  // The observed corpus is the `num_search` sequences of the search half, then those of the
  // confirmation half. `statistics`: one per layer, of the other sequences. On a GPU up to
  // `layers_together` are searched in threads of their own, with search_needs each, while
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
