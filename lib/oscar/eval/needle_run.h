// Needle prompts through every method: teacher-forced, and by greedy generation.
#pragma once

#include <vector>

#include "oscar/base/progress.h"
#include "oscar/eval/methods.h"
#include "oscar/eval/needle_tasks.h"

namespace oscar {

// One prompt under one method. `margin`: the smallest, over the answer's tokens, of the log
// probability of the right token minus that of the best other one; passes iff it is positive.
struct NeedleOutcome {
  bool passes = false;
  double margin = 0;
};

// Tokens of the largest batch in which the prompts and their answers run.
int64_t largest_needle_batch(const Transformer& model, const std::vector<NeedlePrompt>& prompts);

// Greedy continuation of equally long prompts: ids [prompts, length] int64 -> [prompts, tokens]
// int64 on the CPU. `engine` starts with an empty cache. weights[l]: Transformer::load_layer(l).
torch::Tensor generate_greedily(Transformer& model,
                                const std::vector<std::shared_ptr<const LayerWeights>>& weights,
                                CacheEngine& engine, const torch::Tensor& ids, int64_t tokens);

// outcomes[method][prompt]. The right answer is fed token by token; greedy generation gives the
// same verdict, because it leaves the right path exactly when a margin is not positive.
std::vector<std::vector<NeedleOutcome>> run_needles_forced(Transformer& model,
                                                           const std::vector<Method>& methods,
                                                           const EngineChoice& choice,
                                                           const std::vector<NeedlePrompt>& prompts,
                                                           Progress& progress);

// passes[method][prompt] of greedy generation from a cache that each method quantizes as it grows.
// All layers' weights stay on the device.
std::vector<std::vector<bool>> run_needles_generated(Transformer& model,
                                                     const std::vector<Method>& methods,
                                                     const EngineChoice& choice,
                                                     const std::vector<NeedlePrompt>& prompts,
                                                     Progress& progress);

}  // namespace oscar
