// Memory and time of an evaluation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oscar/eval/text_task.h"
#include "oscar/model/memory.h"

namespace oscar {

// What decides the memory of an evaluation, as the options and the corpus have it.
struct EvaluationSize {
  int64_t batch_tokens = 0;  // of the largest batch
  int64_t longest_sequence = 0;
  size_t methods = 1;
  bool all_weights = false;  // answers are generated with every layer in memory
  int64_t sequences = 0;     // that are generated together, at most
};

// The forward pass with weights of a layer and of its successor, output projection and logits, and
// the rows of the cache that is simulated. What is left is for hidden states (plan_hidden_room).
// Figures do not depend on it: only how many batches pass together from layer to layer.
MemoryNeeds evaluation_needs(const Transformer& model, const EvaluationSize& size);

// Timing one batch of an evaluation.

// Runs the first batch (of texts[0], or of the prompts' tokens where there is no text) through the
// first layer of each LayerSpec, and each method's first INT2 layer of it, and scores it. Layers of
// a spec are taken to cost what those do, and tokens of prompts what tokens of the text do.
EvaluationCost estimate_cost(const EvaluateOptions& options, const Session& session,
                             Transformer& model, const std::vector<Method>& methods,
                             const std::vector<const TextTask*>& texts,
                             const std::vector<NeedlePrompt>& prompts, const Ranks& ranks);

}  // namespace oscar
