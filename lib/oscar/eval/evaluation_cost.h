// Memory and time of an evaluation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oscar/eval/text_task.h"
#include "oscar/model/run_plan.h"

namespace oscar {

// What an evaluation takes of the memory that it may use, and what that leaves for hidden states.

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

// Timing one batch of an evaluation.

// Runs the first batch (of texts[0], or of the prompts' tokens where there is no text) through the
// first layer of each LayerSpec, and each method's first INT2 layer of it, and scores it. Layers of
// a spec are taken to cost what those do, and tokens of prompts what tokens of the text do.
EvaluationCost estimate_cost(const EvaluateOptions& options, const Session& session,
                             Transformer& model, const std::vector<Method>& methods,
                             const std::vector<const TextTask*>& texts,
                             const std::vector<NeedlePrompt>& prompts, const Ranks& ranks);

}  // namespace oscar
