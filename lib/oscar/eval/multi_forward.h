// All compared methods through the model together, one layer's weights at a time.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "oscar/base/progress.h"
#include "oscar/int2/cache_engine.h"
#include "oscar/model/transformer.h"

namespace oscar {

// Sums behind the NMSE of the attention output against the reference's, both with all that the
// layers before have done to them: sum |o - o_ref|^2 / sum |o_ref|^2, of a KV head over its query
// heads.
struct OutputError {
  std::vector<std::vector<double>> error, energy;  // [num_layers][num_kv_heads]
};

struct MultiForward {
  // engines[0] must be null: the reference. A null engine elsewhere is the reference again.
  std::vector<CacheEngine*> engines;
  int64_t position_offset = 0;
  int64_t first_query = 0;  // queries before it stay out of OutputError
  // Bytes that hidden states between layers may take; one batch at least passes (eval_memory.h).
  int64_t hidden_state_room = std::numeric_limits<int64_t>::max();
  // Blocks are only as long as keeps reading weights under a twentieth of the time: what is not
  // through yet is lost when a run is stopped.
  bool short_blocks = false;
};

// Receives the hidden states of one batch after the last layer, hidden[m] [batch, tokens, hidden],
// and its sums.
using BatchSink = std::function<void(size_t batch, const std::vector<torch::Tensor>& hidden,
                                     std::vector<OutputError> errors)>;

// Runs `batches` ([sequences, tokens] int64 each) and hands each to `sink`, in order. Weights pass
// once per block of batches whose hidden states of all methods fit hidden_state_room; a method
// shares the reference's states up to its first INT2 layer. One OutputError per engine. Throws
// Error when a hidden state is not finite (naming method index and layer) and Interrupted on
// request.
void run_multi_forward(Transformer& model, const MultiForward& methods,
                       const std::vector<torch::Tensor>& batches, const BatchSink& sink,
                       Progress& progress);

}  // namespace oscar
