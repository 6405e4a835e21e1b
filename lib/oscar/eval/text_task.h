// A text through all methods: its batches, and their scores.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "oscar/eval/report_json.h"
#include "oscar/eval/session.h"
#include "oscar/model/ranks.h"

namespace oscar {

struct TextTask {
  std::vector<torch::Tensor> batches = {};  // [sequences, tokens] int64 each
  int64_t first_position = 0;               // index of the first predicted token that counts
  int64_t tokens = 0;                       // that count
  int64_t longest = 0;                      // sequence in tokens

  int64_t counted(size_t batch) const {
    return batches[batch].size(0) * (batches[batch].size(1) - first_position);
  }
};

// Consecutive sequences of one length as one tensor, up to a number of tokens.
std::vector<torch::Tensor> make_batches(const std::vector<std::vector<int32_t>>& sequences,
                                        int64_t batch_tokens);

// Throws Error when fewer than kFewestTokens tokens count.
TextTask plan_text(const std::vector<std::vector<int32_t>>& sequences, int64_t first,
                   const torch::Device& device);

// Engines of `methods`, in their order, for the text task.
std::vector<std::unique_ptr<CacheEngine>> text_engines(const EvaluateOptions& options,
                                                       const Session& session,
                                                       const ModelConfig& config,
                                                       const std::vector<Method>& methods);

// Batches whose tokens `state` has counted. Throws Error where it ends within one.
size_t batches_done(const TextTask& task, const TextState& state);

// Continues `state`, of `done` batches, to the end of the text; of several processes that of the
// first, and each passes its own batches. `counted` is called behind each batch, when `state` holds
// it. When this throws, `state` holds whole batches.
void measure_text(const EvaluateOptions& options, const Session& session, Transformer& model,
                  const std::vector<Method>& methods, const TextTask& task, const char* name,
                  Ranks& ranks, size_t done, TextState& state, const std::function<void()>& counted,
                  Progress& progress);

// Tokens that `state` has counted.
int64_t counted_tokens(const TextState& state);

// The figures of what `state` has counted.
TextResults text_results(const TextTask& task, const TextState& state);

}  // namespace oscar
