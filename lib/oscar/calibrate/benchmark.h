// What collecting statistics costs beside the forward pass alone, in one run.
#pragma once

#include <vector>

#include "oscar/data/corpus.h"
#include "oscar/model/transformer.h"

namespace oscar {

struct CollectionTiming {
  int64_t tokens = 0;
  std::vector<double> forward_seconds;  // per repeat: layers only, nothing observed
  std::vector<double> collect_seconds;  // per repeat: the same with every moment and sum
};

// Runs the whole corpus `repeats` times each way, in turn, after one warm-up of both. Weights stay
// resident. `batch_tokens` as in CalibrateOptions.
CollectionTiming time_collection(Transformer& model, const TokenChunks& corpus,
                                 int64_t batch_tokens, int repeats);

}  // namespace oscar
