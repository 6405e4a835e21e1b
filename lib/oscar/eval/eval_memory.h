// What an evaluation takes of the memory that it may use, and what that leaves for hidden states.
#pragma once

#include <cstddef>
#include <cstdint>

#include "oscar/executor/run_plan.h"

namespace oscar {

// What decides the memory of an evaluation, as the options and the corpus have it.
struct EvaluationSize {
  int64_t batch_tokens = 0;  // of the largest batch
  int64_t longest_sequence = 0;
  size_t methods = 1;
  bool all_weights = false;  // answers are generated with every layer in memory
};

// Bytes on the side that computes beside hidden states between layers: the forward pass, weights of
// a layer and of its successor, output projection and logits, and the rows of the cache that is
// simulated.
int64_t evaluation_bytes(const Transformer& model, const EvaluationSize& size);

// Bytes that hidden states between layers may take: half of what is left, so that what is not
// counted has a place; all of it where one batch needs more than half. Figures do not depend on
// this: only how many batches pass together from layer to layer. Throws Error when one batch does
// not fit.
int64_t hidden_state_room(const Transformer& model, const EvaluationSize& size,
                          const MemoryLimits& limits);

}  // namespace oscar
