// Runs over a small model that stop after any pass of a layer and continue from their checkpoint.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "model/small_model.h"
#include "oscar/calibrate/assemble.h"
#include "oscar/calibrate/collector.h"
#include "oscar/calibrate/resume.h"

namespace oscar_test {

using namespace oscar;

// Sequences of the given lengths; token ids are below 61, in another order in each sequence.
inline TokenSequences small_corpus(const std::vector<int>& lengths) {
  TokenSequences corpus;
  int32_t id = 1, index = 0;
  for (const int length : lengths) {
    auto& sequence = corpus.sequences.emplace_back();
    for (int i = 0; i < length; ++i) sequence.push_back(id = (id * 29 + index) % 61);
    corpus.record.tokens += length;
    ++index;
  }
  return corpus;
}

struct Stopped {};

class SmallRun : public testing::Test {
 protected:
  struct Sums {
    std::vector<LayerStatistics> statistics;
    SumSnapshots snapshots;
  };

  // batch_tokens: at most so many in a batch.
  SmallRun(const std::string& config, TokenSequences corpus, int64_t batch_tokens,
           const FitOptions& fit)
      : model_(make_tensors(config), config),
        corpus_(std::move(corpus)),
        batch_tokens_(batch_tokens) {
    torch::set_num_threads(1);  // tiny tensors
    options_.output = folder_.path() / "out.h5";
    options_.fit = fit;
    run_ = describe_run(options_, model_.checkpoint, corpus_.record);
    run_.run_key = "this run";
    run_.quantizer.quant_group_size = 8;
    const ModelConfig& model = model_.transformer->config();
    for (int i = 0; i < model.num_layers; ++i) layers_.push_back(model.geometry(i, 256));
  }

  // All batches, in waves of so many; no copies of running sums.
  CollectionPlan plan(size_t batches_per_wave) const {
    CollectionPlan plan;
    plan.batches = plan_batches(corpus_.sequences, batch_tokens_);
    plan.block_tokens = plan_blocks(plan.batches);
    for (size_t i = 0; i < plan.batches.size(); i += batches_per_wave) {
      const size_t count = std::min(batches_per_wave, plan.batches.size() - i);
      plan.waves.push_back({i, count, tokens_of(plan, i, count)});
    }
    plan.memory.weights_resident = true;
    plan.hidden_bytes_per_token = model_.transformer->config().hidden_size * sizeof(float);
    plan.memory.hidden_room = 1 << 20;
    return plan;
  }

  // Continues from the checkpoint, if there is one. Saves and throws Stopped after `layer_passes`;
  // save_snapshots: the checkpoint has the copies of running sums too.
  Sums collect(const CollectionPlan& plan, int layer_passes = 1000, bool save_snapshots = true) {
    CheckpointFile file(options_, run_);
    MomentPass pass(*model_.transformer, layers_,
                    [&](const MomentPass& sums, const RunPosition& next) {
                      if (--layer_passes > 0) return;
                      file.save(sums.block(), next, sums.blocks_before(),
                                save_snapshots ? sums.snapshots() : SumSnapshots{});
                      throw Stopped{};
                    },
                    {plan.block_tokens, plan.snapshot_tokens});
    RunPosition start;
    if (auto saved = file.load(plan)) {
      pass.restore(saved->statistics, saved->before, std::move(saved->snapshots));
      start = std::move(saved->position);
    }
    SilentProgress progress;
    run_layer_major(*model_.transformer, corpus_, plan, std::move(start), pass, progress);
    file.remove();
    return {pass.result(), pass.snapshots()};
  }

  TemporaryFolder folder_;
  Model model_;
  TokenSequences corpus_;
  int64_t batch_tokens_;
  CalibrateOptions options_;
  Bundle run_;
  std::vector<LayerGeometry> layers_;
};

}  // namespace oscar_test
