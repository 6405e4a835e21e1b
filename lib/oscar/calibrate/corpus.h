// The text of a run, and what of it is held back.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/calibrate/options.h"
#include "oscar/calibrate/search/pass.h"
#include "oscar/model/memory.h"
#include "oscar/model/transformer.h"
#include "oscar/text/corpus.h"

namespace oscar {

// What a run and its dry run share: which sequences are fitted and searched, and how the search
// runs.

// What the search's fits are made of, and what it decides on, search half first; empty: no search.
struct SplitCorpus {
  TokenSequences fit, held_back;
  size_t num_search = 0, num_confirm = 0;
};

// Where nothing is held back, options.search is cleared; `warnings` gets the reason if it is not
// the options themselves.
SplitCorpus split_corpus(const TokenSequences& corpus, CalibrateOptions& options,
                         std::vector<std::string>& warnings);

// Why a verdict on the text would mean nothing, with what to do: no row of it is in 2 bits, though
// rows count by their attention, or most of it repeats itself. "": neither.
struct TextProblem {
  std::string what, hint;
};
TextProblem text_problem(const CalibrateOptions& options, const TokenSequences& corpus);

inline constexpr double kMostRepeated = 0.5;  // share of the text that repeats itself

// What the search holds of it.
HeldBackSize held_back_size(const SplitCorpus& split);

SearchSettings search_settings(const CalibrateOptions& options);

std::vector<LayerGeometry> geometries(const CalibrateOptions& options, const ModelConfig& config);

// The windows by which rows are weighted by attention; nothing when no fit of the run needs it.
std::optional<CacheView> attended_view(const CalibrateOptions& options);

// Whether the fit needs the second pass, over value energies.
bool wants_energy(const CalibrateOptions& options);

// Token sequences for a run: read from files, or written by the model itself.

// `sequence_length` resolved. self:N needs all weights on the device: throws Error with the way out
// (ids made beforehand) when they do not fit within `limits`.
TokenSequences make_sequences(const CalibrateOptions& options, int sequence_length,
                              const Checkpoint& checkpoint, Transformer& model,
                              const MemoryLimits& limits, Progress& progress);

}  // namespace oscar
