// What a run and its dry run share: which chunks are fitted and searched, and how the search runs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/calibrate/options.h"
#include "oscar/data/corpus.h"
#include "oscar/executor/run_plan.h"
#include "oscar/search/memory.h"
#include "oscar/search/pass.h"

namespace oscar {

// What the search's fits are made of, and what it decides on, search half first; empty: no search.
struct SplitCorpus {
  TokenChunks fit, held_back;
  size_t num_search = 0, num_confirm = 0;
};

// Where nothing is held back, options.search is cleared; `warnings` gets the reason if it is not
// the options themselves.
SplitCorpus split_corpus(const TokenChunks& corpus, CalibrateOptions& options,
                         std::vector<std::string>& warnings);

// What the search holds of it.
HeldBackSize held_back_size(const SplitCorpus& split);

// How many layers a GPU searches side by side within `limits`, beside what `plan` takes.
int layers_searched_together(const Transformer& model, const SplitCorpus& split,
                             const RunPlan& plan, const CalibrateOptions& options,
                             const MemoryLimits& limits);

// What the search of a layer takes on the side that computes beside a pass of that workspace.
int64_t search_bytes(const Transformer& model, const SplitCorpus& split,
                     const CalibrateOptions& options, int64_t workspace_bytes);

// Held-back chunks are few, and a layer is searched once all of them have passed it: one wave.
// Throws Error when a layer's search does not fit within `limits`.
RunPlan plan_search(const Transformer& model, const SplitCorpus& split,
                    const CalibrateOptions& options, const MemoryLimits& limits);

SearchSettings search_settings(const CalibrateOptions& options);

std::vector<LayerGeometry> geometries(const CalibrateOptions& options, const ModelConfig& config);

// The windows by which rows are weighted by attention; nothing when no fit of the run needs it.
std::optional<CacheView> attended_view(const CalibrateOptions& options);

// Whether the fit needs the second pass, over value energies.
bool wants_energy(const CalibrateOptions& options);

}  // namespace oscar
