// All sequences through one layer, then the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/model/layer_weights.h"
#include "oscar/model/ranks.h"
#include "oscar/model/run_plan.h"
#include "oscar/model/transformer.h"
#include "oscar/text/corpus.h"

namespace oscar {

// What each of several processes takes of the machine that they share.

// choose_compute; of several processes, where it is any GPU, each has its own. `progress` notes
// that there are none where "auto" has found none.
ComputeOptions own_compute(const Ranks& ranks, const std::string& device, const std::string& dtype,
                           Progress& progress);

// memory_limits; where `host_memory` leaves it open, an equal part of what is free.
MemoryLimits own_memory(const Ranks& ranks, const torch::Device& device, int64_t host_memory,
                        int64_t gpu_memory);

// The part of `pieces` equal pieces of work, dealt in turn, that decides how long all of them take:
// of the process that gets most, if processes compute side by side. On a CPU those of a machine do
// as far as there are cores for the threads of each; what is left takes turns.
double longest_part(const Ranks& ranks, const torch::Device& device, size_t pieces);

// Pieces of work that the processes of a run are dealt in turn, and their results in order.

using PieceDone = std::function<void(size_t piece, std::vector<uint8_t> result)>;

// Of the pieces from `begin` to `end`, `work` does this process' own, given in ascending order, and
// calls `done` for each of them in that order. In the first process `take` then gets the results of
// all pieces in ascending order, as soon as they and those before them are there: waiting for
// others comes behind its own work. `own`: this process has done that piece. Another process may
// end once wait_until_taken() has returned.
void work_in_turn(
    Ranks& ranks, size_t begin, size_t end,
    const std::function<void(const std::vector<size_t>& pieces, const PieceDone& done)>& work,
    const std::function<void(size_t piece, const std::vector<uint8_t>& result, bool own)>& take);

// Weights of one layer after another, the next ones read while the present one computes.

// Not for use by two threads.
class LayerLoader {
 public:
  // `resident`: all layers stay once read, on a GPU for the model's later loaders too, until one
  // that is not resident begins; otherwise the present and the next one. One loader of a model at a
  // time is resident on a GPU.
  LayerLoader(Transformer& model, bool resident);
  ~LayerLoader();
  LayerLoader(const LayerLoader&) = delete;
  LayerLoader& operator=(const LayerLoader&) = delete;

  // The weights of `layer`, valid until the next call. On a GPU those of the next one are read from
  // then on. Without `resident` the device has finished with the layer before. Throws as
  // Transformer::load_layer does.
  const LayerWeights& get(int layer);

 private:
  using Weights = std::shared_ptr<const LayerWeights>;

  void load_ahead(int layer);
  void wait_for_device() const;

  const Transformer& model_;
  bool resident_;
  std::vector<Weights> own_;
  std::vector<Weights>& layers_;  // [num_layers], own or the model's; null: not on the device
  int present_ = -1;
  int coming_ = -1;  // the layer that is being read
  std::future<Weights> reading_;
};

// Runs a corpus through the model layer by layer: a wave of sequences advances through one layer
// before the next layer's weights are needed, so that a model larger than the device passes through
// it.

// Where a run stands, whatever its plan: every layer has seen the batches before `batch`; those of
// `hidden`, from `batch` on, have passed the layers before `layer` and enter that one next. After
// the last batch `batch` is the number of batches.
struct RunPosition {
  size_t batch = 0;
  int layer = 0;
  std::vector<torch::Tensor> hidden;  // one [sequences, tokens, hidden] per batch; empty at layer 0
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
void run_layer_major(Transformer& model, const TokenSequences& corpus, const RunPlan& plan,
                     RunPosition start, LayerVisitor& visitor, Progress& progress);

// Token ids of one batch as [sequences, tokens] int64 on the CPU.
torch::Tensor batch_ids(const TokenSequences& corpus, const Batch& batch);

}  // namespace oscar
