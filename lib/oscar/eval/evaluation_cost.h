// Timing one batch of an evaluation.
#pragma once

#include <vector>

#include "oscar/eval/text_task.h"

namespace oscar {

// Runs the first batch (of texts[0], or of the prompts' tokens where there is no text) through the
// first layer of each LayerSpec, and each method's first INT2 layer of it, and scores it. Layers of
// a spec are taken to cost what those do, and tokens of prompts what tokens of the text do.
EvaluationCost estimate_cost(const EvaluateOptions& options, const Session& session,
                             Transformer& model, const std::vector<Method>& methods,
                             const std::vector<const TextTask*>& texts,
                             const std::vector<NeedlePrompt>& prompts, const Ranks& ranks);

}  // namespace oscar
