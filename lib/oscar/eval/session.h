// What an evaluation opens, checks to belong together, and says of itself.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/input_file.h"
#include "oscar/bundle/bundle.h"
#include "oscar/checkpoint/checkpoint.h"
#include "oscar/data/corpus.h"
#include "oscar/data/tokenizer.h"
#include "oscar/eval/evaluate.h"
#include "oscar/eval/methods.h"
#include "oscar/executor/ranks.h"
#include "oscar/executor/run_plan.h"
#include "oscar/model/compute.h"

namespace oscar {

// What a run has opened.
struct Session {
  Checkpoint checkpoint;
  LongInputs weights;  // from when they were opened
  std::optional<Tokenizer> tokenizer = {};
  std::optional<Bundle> bundle = {};
  std::vector<NamedBundle> named = {};
  TokenChunks corpus = {};
  ComputeOptions compute = {};
  MemoryLimits memory = {};
  EngineChoice engine = {};
  QuantizerSettings quantizer = {};
};

// Mode and prompt of the text task: under `prefill` the tokens before the first counted one are
// the prompt (`prompt` tokens); under `chunked:N` all are.
CacheView text_view(const EvaluateOptions& options, int64_t prompt);

// Throws Error as evaluate() does for bad input.
Session open_session(const EvaluateOptions& options, const Ranks& ranks, Progress& progress);

// The methods of the comparison in order, bf16 first; sweeps and sensitivity after the rest.
std::vector<Method> build_methods(const EvaluateOptions& options, const Session& session,
                                  const CacheView& view, Progress& progress);

// The head of the report (SCHEMA.md), without methods and figures.
Json describe_session(const EvaluateOptions& options, const Session& session);

}  // namespace oscar
