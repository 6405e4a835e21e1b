// Collecting with several processes: blocks are dealt in turn, their sums come together in the
// first, which adds them in order as one process does.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "oscar/calibrate/statistics_pass.h"
#include "oscar/executor/ranks.h"

namespace oscar {

// In the first process. Each round it passes one block, then takes the sums of the next blocks from
// the others. What `moments` holds is therefore always of a beginning of the corpus: a checkpoint
// is that of one process, and continues with any number. `pass` runs over the batches of a plan
// from a position on; `block_taken` is called with the position behind another's block, whose sums
// `moments` has then, and its tokens.
void collect_with_others(
    Ranks& ranks, const RunPlan& plan, RunPosition start, MomentPass& moments,
    const std::function<void(const RunPlan& plan, RunPosition start)>& pass,
    const std::function<void(const RunPosition& next, int64_t tokens)>& block_taken);

// In the others: passes this process' blocks of what is left from `start` on, of which only the
// number of batches counts that have begun.
struct BlockStart {
  size_t batch = 0, begun = 0;
};
void collect_for_first(Ranks& ranks, Transformer& model, const TokenChunks& corpus,
                       const RunPlan& plan, BlockStart start,
                       const std::vector<LayerGeometry>& layers,
                       const std::optional<CacheView>& attended);

}  // namespace oscar
