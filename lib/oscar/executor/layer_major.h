// Runs a corpus through the model layer by layer: a wave of chunks advances through one layer
// before the next layer's weights are needed, so that a model larger than the device passes through
// it.
#pragma once

#include <vector>

#include "oscar/base/progress.h"
#include "oscar/data/corpus.h"
#include "oscar/executor/run_plan.h"
#include "oscar/model/transformer.h"

namespace oscar {

// Where a run stands, whatever its plan: every layer has seen the batches before `batch`; those of
// `hidden`, from `batch` on, have passed the layers before `layer` and enter that one next. After
// the last batch `batch` is the number of batches.
struct RunPosition {
  size_t batch = 0;
  int layer = 0;
  std::vector<torch::Tensor> hidden;  // one [chunks, tokens, hidden] per batch; empty at layer 0
};

// What happens around each layer. The observer of a layer sees its batches in corpus order.
class LayerVisitor {
 public:
  virtual ~LayerVisitor() = default;
  virtual AttentionObserver* observer(int layer) = 0;  // may be null
  // `next` is where a resumed run would start. Called after each layer and after each wave. Its
  // hidden states may be written over by the layer that comes then.
  virtual void layer_done(const RunPosition& next) = 0;
};

// Advances from `start`, a position under any plan, to the end of the last wave. Throws
// Interrupted after layer_done when a stop was requested. Progress counts tokens times layers.
void run_layer_major(Transformer& model, const TokenChunks& corpus, const RunPlan& plan,
                     RunPosition start, LayerVisitor& visitor, Progress& progress);

// Token ids of one batch as [chunks, tokens] int64 on the CPU.
torch::Tensor batch_ids(const TokenChunks& corpus, const Batch& batch);

}  // namespace oscar
