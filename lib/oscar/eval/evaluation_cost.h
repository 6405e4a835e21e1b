// Timing one batch of an evaluation.
#pragma once

#include <vector>

#include "oscar/eval/text_task.h"

namespace oscar {

// Runs the first batch (of texts[0], or of the prompts' tokens where there is no text) through
// layer 0, and each method's first INT2 layer, and scores it. Layers of a method are taken to cost
// what that one does, and tokens of prompts what tokens of the text do.
EvaluationCost estimate_cost(const EvaluateOptions& options, const Session& session,
                             Transformer& model, const std::vector<Method>& methods,
                             const std::vector<const TextTask*>& texts,
                             const std::vector<NeedlePrompt>& prompts);

}  // namespace oscar
