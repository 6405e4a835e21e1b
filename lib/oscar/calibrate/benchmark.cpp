// Alternating runs with and without the collectors.
#include "oscar/calibrate/benchmark.h"

#include <algorithm>
#include <chrono>

#include "oscar/calibrate/statistics_pass.h"

namespace oscar {
namespace {

class NothingObserved final : public LayerVisitor {
 public:
  AttentionObserver* observer(int) override { return nullptr; }
  void layer_done(const RunPosition&) override {}
};

double seconds_of_pass(Transformer& model, const TokenChunks& corpus, const RunPlan& plan,
                       LayerVisitor& visitor) {
  SilentProgress progress;
  const auto finish = [&] {
    if (model.compute().device.is_cuda()) torch::cuda::synchronize(model.compute().device.index());
  };
  finish();
  const auto start = std::chrono::steady_clock::now();
  run_layer_major(model, corpus, plan, {}, visitor, progress);
  finish();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

CollectionTiming time_collection(Transformer& model, const TokenChunks& corpus,
                                 int64_t batch_tokens, int repeats) {
  RunPlan plan;
  plan.batches = plan_batches(corpus.chunks, batch_tokens);
  plan.waves = {{0, plan.batches.size(), corpus.record.tokens}};
  plan.weights_resident = true;
  std::vector<LayerGeometry> layers;
  for (int layer = 0; layer < model.config().num_layers; ++layer) {
    layers.push_back(model.config().geometry(layer, /*recent_tokens=*/0));
  }
  CollectionTiming timing;
  timing.tokens = corpus.record.tokens;
  for (int repeat = -1; repeat < repeats; ++repeat) {
    NothingObserved nothing;
    MomentPass moments(model, layers, [](const MomentPass&, const RunPosition&) {});
    const double forward = seconds_of_pass(model, corpus, plan, nothing);
    const double collect = seconds_of_pass(model, corpus, plan, moments);
    if (repeat < 0) continue;  // warm-up
    timing.forward_seconds.push_back(forward);
    timing.collect_seconds.push_back(collect);
  }
  return timing;
}

}  // namespace oscar
