// How a calibration's passes run: blocks and copies of sums, and what memory all of it needs.
#pragma once

#include <cstdint>
#include <vector>

#include "oscar/calibrate/corpus.h"
#include "oscar/model/memory.h"
#include "oscar/model/run_plan.h"

namespace oscar {

// Of a pass that collects sums.
struct CollectionPlan : RunPlan {
  // Tokens at the ends of the blocks whose sums are added up one after another; the last is of all.
  std::vector<int64_t> block_tokens;
  // Tokens, at ends of batches, at which each layer's sums are copied (calibrate/assemble.h).
  std::vector<int64_t> snapshot_tokens;
  bool attended = false;  // sums weighted by attention are collected too
};

// Tokens up to the ends of batches that are nearest to each eighth of all, ascending and without
// repetition; the last is of all. Depends on the batches only: sums are of a block, and blocks are
// added in order, so that no figure depends on how many processes share them.
std::vector<int64_t> plan_blocks(const std::vector<Batch>& batches);

// Of plan.block_tokens, the last that is at most `tokens`; 0 where there is none.
int64_t block_start(const CollectionPlan& plan, int64_t tokens);

// Tokens up to the ends of batches that are nearest to a quarter and to half of all, ascending and
// without repetition; the end of the last batch is none of them. Empty for a single batch.
std::vector<int64_t> plan_snapshots(const std::vector<Batch>& batches);

// What `count` copies of all layers' sums take in host memory and in a checkpoint.
int64_t snapshot_bytes(const ModelConfig& config, size_t count, bool attended);

// Sums of output gates, one of each kind: of all layers together.
int64_t gate_sums_bytes(const ModelConfig& config);

// How sums are collected and saved, as far as it decides their memory.
struct StatisticsSize {
  size_t snapshots = 0;   // copies of sums
  bool attended = false;  // with sums weighted by attention
  bool saved = false;     // checkpoints are written
  int processes = 1;      // that share the text
};

// The sums of all layers, running and copied, and a checkpoint of them.
std::vector<MemoryNeed> statistics_needs(const ModelConfig& config, const StatisticsSize& size);

// Of `sequences`, the text that is fitted to. Throws as plan_memory does.
CollectionPlan plan_collection(const Transformer& model,
                               const std::vector<std::vector<int32_t>>& sequences,
                               const CalibrateOptions& options, const MemoryLimits& limits,
                               int processes);

// Held-back sequences are few, and a layer is searched once all of them have passed it: one wave.
// Throws Error when a layer's search does not fit within `limits`.
RunPlan plan_search(const Transformer& model, const SplitCorpus& split,
                    const CalibrateOptions& options, const MemoryLimits& limits);

// At the end of a run: the bundle as it is, and as the bytes of its file.
MemoryNeeds writing_needs(const Transformer& model, int64_t bundle_bytes);

}  // namespace oscar
