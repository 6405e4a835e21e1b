// What was chosen to a bundle, with the verdict on its text.
#pragma once

#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"
#include "oscar/calibrate/collection_plan.h"
#include "oscar/calibrate/collector.h"
#include "oscar/calibrate/options.h"
#include "oscar/model/checkpoint/checkpoint.h"
#include "oscar/model/layer_weights.h"

namespace oscar {

// Whether the collected text was enough, from copies of each layer's sums taken on the way.

// convergence_record (fit/convergence.h) of all quantized layers. `snapshots` were taken at
// plan.snapshot_tokens, `statistics` are the complete sums of all layers. Of `options` centering
// and positions count. `may_stop`: throws Interrupted when a stop was requested.
Json judge_convergence(const SumSnapshots& snapshots,
                       const std::vector<LayerStatistics>& statistics, const CollectionPlan& plan,
                       const FitOptions& options, const Rope& rope, bool may_stop,
                       Progress& progress);

// What a run says about itself: the bundle's descriptive part, its identity, and its sizes.

// A bundle without layers: model, corpus, quantizer and fit settings of this run.
Bundle describe_run(const CalibrateOptions& options, const Checkpoint& checkpoint,
                    const CorpusRecord& corpus);

// How choices are made, as stored in the bundle's root. Part of run_key.
Json describe_search(const SearchOptions& search, uint64_t seed, size_t search_sequences,
                     size_t confirm_sequences, int64_t held_back_tokens);

// sha256 over everything that decides the statistics: weights, rope as run, tokens, device kind,
// precision and batch size. Paths, names and memory limits are no part of it, so a checkpoint
// survives a moved model folder. The fit is part of it too: a finished OUT is recognised by it.
std::string run_key(const CalibrateOptions& options, const Bundle& bundle,
                    const ComputeOptions& compute);

// `attended`: with sums weighted by attention.
int64_t estimated_statistics_bytes(const std::vector<LayerGeometry>& layers, bool attended);
int64_t estimated_bundle_bytes(const std::vector<LayerGeometry>& layers,
                               const CalibrateOptions& options);

}  // namespace oscar
