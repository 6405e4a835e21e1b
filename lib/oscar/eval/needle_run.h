// Needle prompts through every method: teacher-forced, and by greedy generation.
#pragma once

#include <functional>
#include <vector>

#include "oscar/base/progress.h"
#include "oscar/eval/methods.h"
#include "oscar/eval/needle_tasks.h"
#include "oscar/executor/ranks.h"

namespace oscar {

// One prompt under one method. `margin`: the smallest, over the answer's tokens, of the log
// probability of the right token minus that of the best other one; passes iff it is positive.
struct NeedleOutcome {
  bool passes = false;
  double margin = 0;
};

// passes from its margin.
inline NeedleOutcome needle_outcome(double margin) { return {margin > 0, margin}; }

// Batches in which the prompts and their answers run, and the tokens of the largest.
size_t num_needle_batches(const Transformer& model, const std::vector<NeedlePrompt>& prompts);
int64_t largest_needle_batch(const Transformer& model, const std::vector<NeedlePrompt>& prompts);

// Greedy continuation of equally long prompts: ids [prompts, length] int64 -> [prompts, tokens]
// int64 on the CPU. `engine` starts with an empty cache. weights[l]: Transformer::load_layer(l).
torch::Tensor generate_greedily(Transformer& model,
                                const std::vector<std::shared_ptr<const LayerWeights>>& weights,
                                CacheEngine& engine, const torch::Tensor& ids, int64_t tokens);

// Continues outcomes[method][prompt] from the first `done` prompts, which it holds, to all of
// `prompts`; of several processes those of the first, and each passes its own batches. The right
// answer is fed token by token; greedy generation gives the same verdict, because it leaves the
// right path exactly when a margin is not positive. `counted` is called behind each batch.
void run_needles_forced(Transformer& model, const std::vector<Method>& methods,
                        const EngineChoice& choice, const std::vector<NeedlePrompt>& prompts,
                        Ranks& ranks, size_t done,
                        std::vector<std::vector<NeedleOutcome>>& outcomes,
                        const std::function<void()>& counted, Progress& progress);

// Continues `passes`, which holds `done` of them, in the same way: greedy generation from a cache
// that each method quantizes as it grows, one method after another, of each all prompts in order.
// All layers' weights stay on the device. `counted` is called behind each batch.
void run_needles_generated(Transformer& model, const std::vector<Method>& methods,
                           const EngineChoice& choice, const std::vector<NeedlePrompt>& prompts,
                           Ranks& ranks, size_t done, std::vector<bool>& passes,
                           const std::function<void()>& counted, Progress& progress);

}  // namespace oscar
