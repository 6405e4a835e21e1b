// Collecting with several processes: blocks are dealt in turn, their sums come together in the
// first, which adds them in order as one process does.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "oscar/calibrate/statistics_pass.h"
#include "oscar/executor/ranks.h"

namespace oscar {

struct Collecting {
  Transformer& model;
  const TokenChunks& corpus;
  const RunPlan& plan;
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

}  // namespace oscar
