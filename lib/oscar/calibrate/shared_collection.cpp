// Who passes which block, and the sums on their way.
#include "oscar/calibrate/shared_collection.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "oscar/calibrate/convergence_stage.h"

namespace oscar {
namespace {

struct BatchRange {
  size_t begin = 0, end = 0;
};

// Blocks from `start` on. The first goes on until the batches that have begun are over.
std::vector<BatchRange> blocks_from(const RunPlan& plan, BlockStart start) {
  std::vector<BatchRange> blocks;
  int64_t tokens = 0;
  size_t begin = start.batch;
  for (size_t end = 1; end <= plan.batches.size(); ++end) {
    tokens += plan.batches[end - 1].tokens();
    const bool block_end = std::find(plan.block_tokens.begin(), plan.block_tokens.end(), tokens) !=
                           plan.block_tokens.end();
    if (!block_end || end <= start.batch || end < start.batch + start.begun) continue;
    blocks.push_back({begin, end});
    begin = end;
  }
  return blocks;
}

// The plan up to a batch.
RunPlan part_of(const RunPlan& plan, size_t end) {
  RunPlan part = plan;
  part.batches.resize(end);
  part.shards.clear();
  for (Shard shard : plan.shards) {
    if (shard.first_batch >= end) break;
    shard.num_batches = std::min(shard.num_batches, end - shard.first_batch);
    shard.tokens = tokens_of(plan, shard.first_batch, shard.num_batches);
    part.shards.push_back(shard);
  }
  return part;
}

constexpr const char* kBlock = "block";

}  // namespace

void collect_with_others(
    Ranks& ranks, const RunPlan& plan, RunPosition start, MomentPass& moments,
    const std::function<void(const RunPlan& plan, RunPosition start)>& pass,
    const std::function<void(const RunPosition& next, int64_t tokens)>& block_taken) {
  const auto blocks = blocks_from(plan, {start.batch, start.hidden.size()});
  std::vector<LayerStatistics> shapes;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int owner = ranks.owner(i);
    if (owner == 0) {
      RunPosition begin{blocks[i].begin, 0, {}};
      if (i == 0) begin = std::move(start);
      pass(part_of(plan, blocks[i].end), std::move(begin));
      continue;
    }
    const int64_t tokens = tokens_of(plan, blocks[i].begin, blocks[i].end - blocks[i].begin);
    if (shapes.empty()) {  // those of this process' own sums
      shapes = moments.block();
      std::erase_if(shapes, [](const LayerStatistics& s) { return !s.geometry.fitted(); });
    }
    std::vector<ResumeTensor> tensors;
    for (const LayerStatistics& shape : shapes) {
      tensors.push_back({.name = copy_name(kBlock, 0, shape.geometry.layer_id),
                         .dtype = "f64",
                         .shape = {},
                         .bytes = ranks.receive(owner)});
    }
    moments.add_block(load_copies(
        kBlock, tensors, shapes, [&](const LayerGeometry&) { return std::vector<int64_t>{tokens}; },
        "sums of process " + std::to_string(owner)));
    block_taken({blocks[i].end, 0, {}}, tokens);
  }
}

void collect_for_first(Ranks& ranks, Transformer& model, const TokenChunks& corpus,
                       const RunPlan& plan, BlockStart start,
                       const std::vector<LayerGeometry>& layers,
                       const std::optional<CacheView>& attended) {
  const auto blocks = blocks_from(plan, start);
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!ranks.owns(i)) continue;
    MomentPass moments(
        model, layers, [](const MomentPass&, const RunPosition&) {}, {}, attended);
    SilentProgress progress;
    run_layer_major(model, corpus, part_of(plan, blocks[i].end), {blocks[i].begin, 0, {}}, moments,
                    progress);
    SumSnapshots sums;
    for (LayerStatistics& layer : moments.block()) {
      if (layer.geometry.fitted()) sums.push_back(std::make_shared<LayerStatistics>(layer));
    }
    std::vector<ResumeTensor> tensors;
    save_copies(kBlock, sums, tensors);
    ranks.wait_until_taken();
    for (const ResumeTensor& tensor : tensors) ranks.send(0, tensor.bytes);
  }
  ranks.wait_until_taken();
}

}  // namespace oscar
