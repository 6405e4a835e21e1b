// An evaluation under way, its checkpoint, and all methods in one forward pass.
#pragma once

#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oscar/attention/int2_attention.h"
#include "oscar/base/error.h"
#include "oscar/base/files.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/eval/estimate.h"
#include "oscar/eval/evaluate.h"
#include "oscar/eval/methods.h"
#include "oscar/eval/needles.h"
#include "oscar/model/checkpoint/checkpoint.h"
#include "oscar/model/layer_weights.h"
#include "oscar/model/memory.h"
#include "oscar/model/ranks.h"
#include "oscar/model/transformer.h"
#include "oscar/text/corpus.h"
#include "oscar/text/tokenizer.h"

namespace oscar {

// All compared methods through the model together, one layer's weights at a time.

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
  // Bytes that hidden states between layers may take; one batch at least passes
  // (evaluation_cost.h).
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

// What an evaluation has counted so far, and the checkpoint that keeps it.

// A text, as far as whole batches of it have passed.
struct TextState {
  std::vector<TokenScores> scores;  // [methods]; tokens in the order of the batches
  std::vector<OutputError> errors;  // [methods]; both empty before the first batch
};

struct EvaluationState {
  TextState text, separated;
  std::vector<std::vector<NeedleOutcome>> forced;  // [methods][prompts so far]
  std::vector<bool> generated;  // one method after another, of each its prompts in order, so far
};

// Extents of the figures.
struct EvaluationShape {
  size_t methods = 0, layers = 0, heads = 0;  // KV heads
};

// The figures of a text on their way between processes, to the bit. Throws Error for bytes that are
// not of this shape.
std::vector<uint8_t> text_bytes(const TextState& text);
TextState text_from_bytes(const std::vector<uint8_t>& bytes, const EvaluationShape& shape);

// Figures are saved to the bit: a resumed run reports what an uninterrupted one does.
class EvaluationCheckpoint {
 public:
  // At `path`; empty: nothing is saved or found. `run` describes model and corpus and has a
  // run_key.
  EvaluationCheckpoint(std::filesystem::path path, Bundle run);

  void save(const EvaluationState& state);
  // Saves unless that would take more than a twentieth of the run's time.
  void save_if_due(const EvaluationState& state);
  // nullopt when there is none. Throws Error when it is another run's, or when what it holds is not
  // of this shape.
  std::optional<EvaluationState> load(const EvaluationShape& shape) const;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  Bundle run_;
  SavePace pace_;
};

// What an evaluation opens, checks to belong together, and says of itself.

// What a run has opened.
struct Session {
  Checkpoint checkpoint;
  LongInputs weights;  // from when they were opened
  std::optional<Tokenizer> tokenizer = {};
  std::optional<Bundle> bundle = {};
  std::vector<NamedBundle> named = {};
  TokenSequences corpus = {};
  ComputeOptions compute = {};
  MemoryLimits memory = {};
  EngineChoice engine = {};
  CacheFormat quantizer = {};
};

// Mode and prompt of the text task: under `prefill` the tokens before the first counted one are
// the prompt (`prompt` tokens); under `chunked:N` all are.
CacheView text_view(const EvaluateOptions& options, int64_t prompt);

// Throws Error as evaluate() does for bad input.
Session open_session(const EvaluateOptions& options, const Ranks& ranks, Progress& progress);

// Throws Error unless the model serves `length` positions (`served` in all) behind `offset`.
// `option` is where the length came from.
void require_served(int64_t served, int64_t offset, int64_t length, const char* option);

// The methods of the comparison in order, bf16 first.
std::vector<Method> build_methods(const EvaluateOptions& options, const Session& session,
                                  const CacheView& view, Progress& progress);

// The head of the report (SCHEMA.md), without methods and figures.
Json describe_session(const EvaluateOptions& options, const Session& session);

}  // namespace oscar
