// What an evaluation has counted so far, and the checkpoint that keeps it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "oscar/bundle/run_checkpoint.h"
#include "oscar/eval/multi_forward.h"
#include "oscar/eval/needle_run.h"
#include "oscar/eval/token_scores.h"

namespace oscar {

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

}  // namespace oscar
