// What a run says about itself: the bundle's descriptive part, its identity, and its sizes.
#pragma once

#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/calibrate/options.h"
#include "oscar/checkpoint/checkpoint.h"
#include "oscar/model/compute.h"

namespace oscar {

// A bundle without layers: model, corpus, quantizer and fit settings of this run.
Bundle describe_run(const CalibrateOptions& options, const Checkpoint& checkpoint,
                    const CorpusRecord& corpus);

// How choices are made, as stored in the bundle's root. Part of run_key.
Json describe_search(const CalibrateOptions& options, size_t search_chunks, size_t confirm_chunks,
                     int64_t held_back_tokens);

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
