// A calibration shared among processes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "oscar/calibrate/collection_plan.h"
#include "oscar/calibrate/collector.h"
#include "oscar/model/ranks.h"

namespace oscar {

// Collecting with several processes: blocks are dealt in turn, their sums come together in the
// first, which adds them in order as one process does.

struct Collecting {
  Transformer& model;
  const TokenSequences& corpus;
  const CollectionPlan& plan;
  const std::vector<LayerGeometry>& layers;
  const std::optional<CacheView>& attended;
};

// Called with the sums of a beginning of the corpus, where a checkpoint may be taken, and the
// position behind it. `stop`: on request, so that it must be.
using SaveSums = std::function<void(const Collected& sums, const RunPosition& next, bool stop)>;

// In the first process. `moments` passes the first block from `start` on, or what is left of it,
// and saves while it does. Sums of that block and of all later ones, which processes pass without
// waiting for each other, are added in another thread, in their order: a checkpoint is that of one
// process, and continues with any number. Throws Interrupted once what was added is saved.
Collected collect_with_others(Ranks& ranks, const Collecting& job,
                              std::unique_ptr<MomentPass> moments, RunPosition start,
                              const SaveSums& save, Progress& progress);

// Where a shared collection begins: a batch, and how many from there on have begun.
struct BlockStart {
  size_t batch = 0, begun = 0;
};

// In the others: passes this process' blocks of what is left from `start` on. Sums of a block are
// sent while the next one passes.
void collect_for_first(Ranks& ranks, const Collecting& job, BlockStart start);

// Searching with several processes: each passes the held-back text and searches the layers that are
// dealt to it, whose sums it gets from the first; their decisions come together there.

// The process that decides a layer, of each: layers to be searched are dealt in turn, the others
// are the first's.
std::vector<int> layer_owners(const Ranks& ranks, const std::vector<LayerGeometry>& layers);

// Which layers this process decides.
std::vector<bool> own_layers(const Ranks& ranks, const std::vector<LayerGeometry>& layers);

// In the first: sends the others the sums of their layers, once they are complete, energies too.
void send_statistics(Ranks& ranks, const std::vector<LayerStatistics>& statistics);

// In the first, with its own decisions: puts those of the others beside them, with transforms that
// fit_again must make.
void receive_decisions(Ranks& ranks, const std::vector<LayerGeometry>& layers,
                       std::vector<LayerDecision>& decisions);

// The same transforms, where `statistics` are those of the search: of decisions whose layer is not
// among `own`. Their warnings stay.
void fit_decisions_of_others(const std::vector<bool>& own,
                             const std::vector<LayerStatistics>& statistics,
                             const FitOptions& fixed, const Rope& rope,
                             std::vector<LayerDecision>& decisions);

// In the others: searches what is theirs. `plan`: of split.held_back.
void search_for_first(Ranks& ranks, Transformer& model, const SplitCorpus& split,
                      const RunPlan& plan, const CalibrateOptions& options);

}  // namespace oscar
