// What a run will take, from a layer of each kind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oscar/calibrate/collection_plan.h"
#include "oscar/calibrate/corpus.h"
#include "oscar/model/ranks.h"
#include "oscar/model/transformer.h"
#include "oscar/text/corpus.h"

namespace oscar {

// What collecting statistics costs beside the forward pass alone, in one run.

struct CollectionTiming {
  int64_t tokens = 0;
  std::vector<double> forward_seconds;  // per repeat: layers only, nothing observed
  std::vector<double> collect_seconds;  // per repeat: the same with every moment and sum
};

// Runs the whole corpus `repeats` times each way, in turn, after one warm-up of both. Weights stay
// resident. `batch_tokens` as in CalibrateOptions.
CollectionTiming time_collection(Transformer& model, const TokenSequences& corpus,
                                 int64_t batch_tokens, int repeats);

// What a run would cost, from parts of it that are timed on one layer: --dry-run.

// Seconds as CalibrateResult has them, without opening and reading what the run begins with.
struct CostEstimate {
  double seconds = 0;              // collecting
  double convergence_seconds = 0;  // judging the collected text; 0 where the search hides it
  double fit_seconds = 0;          // 0 with a search, whose fits are in its own time
  double search_seconds = 0;       // 0 without a search
  MemoryPeak peak = {};
  int64_t bundle_bytes = 0;      // of OUT
  int64_t checkpoint_bytes = 0;  // beside OUT while the run lasts
  int64_t stop_bytes = 0;        // of one that a stop between two layers leaves, at most
  size_t num_waves = 0;
  bool weights_resident = false;
};

// Runs one batch through layer 0 a few times, fits it, and searches it: on a GPU, which searches
// several layers at a time, as if it were as many and twice as many layers; on the CPU, with one
// held-back sequence of each half. Of each further LayerSpec, its first layer runs. All layers of a
// spec are taken to load and run as that one does, and all to fit and search as layer 0 does.
// `plan`: of split.fit; `search_plan`: of what is held back, or null. Seconds are of all processes
// of `ranks` together, memory of the first.
CostEstimate estimate_cost(Transformer& model, const SplitCorpus& split, const CollectionPlan& plan,
                           const RunPlan* search_plan, const CalibrateOptions& options,
                           const Ranks& ranks);

}  // namespace oscar
