// Searching with several processes: each passes the held-back text and searches the layers that are
// dealt to it, whose sums it gets from the first; their decisions come together there.
#pragma once

#include <cstdint>
#include <vector>

#include "oscar/calibrate/split_corpus.h"
#include "oscar/executor/ranks.h"

namespace oscar {

// The process that decides a layer, of each: layers to be searched are dealt in turn, the others
// are the first's.
std::vector<int> layer_owners(const Ranks& ranks, const std::vector<LayerGeometry>& layers);

// Which layers this process decides.
std::vector<bool> own_layers(const Ranks& ranks, const std::vector<LayerGeometry>& layers);

// In the first: sends the others the sums of their layers, once they are complete, energies too.
void send_statistics(Ranks& ranks, const std::vector<LayerStatistics>& statistics);

// In the first, with its own decisions: puts those of the others beside them, with transforms that
// fit_again must make.
void receive_decisions(Ranks& ranks, const std::vector<LayerGeometry>& layers,
                       std::vector<LayerDecision>& decisions);

// The same transforms, where `statistics` are those of the search: of decisions whose layer is not
// among `own`. Their warnings stay.
void fit_decisions_of_others(const std::vector<bool>& own,
                             const std::vector<LayerStatistics>& statistics,
                             const FitOptions& fixed, const Rope& rope,
                             std::vector<LayerDecision>& decisions);

// In the others: searches what is theirs. `plan`: of split.held_back.
void search_for_first(Ranks& ranks, Transformer& model, const SplitCorpus& split,
                      const RunPlan& plan, int layers_together, const CalibrateOptions& options);

}  // namespace oscar
