// The loop over waves, layers and batches.
#include "oscar/executor/layer_major.h"

#include <algorithm>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/freed_memory.h"
#include "oscar/base/interrupt.h"
#include "oscar/executor/layer_loader.h"
#include "oscar/model/pinned_memory.h"
#include "oscar/model/side_stream.h"

namespace oscar {
namespace {

std::vector<torch::Tensor> embed_wave(Transformer& model, const TokenChunks& corpus,
                                      const RunPlan& plan, const Wave& wave) {
  std::vector<torch::Tensor> hidden;
  for (size_t i = 0; i < wave.num_batches; ++i) {
    const torch::Tensor ids = batch_ids(corpus, plan.batches[wave.first_batch + i]);
    torch::Tensor states = model.embed(ids.to(model.compute().device));
    hidden.push_back(plan.hidden_on_device ? states : states.to(torch::kCPU));
  }
  return hidden;
}

}  // namespace

torch::Tensor batch_ids(const TokenChunks& corpus, const Batch& batch) {
  torch::Tensor ids = torch::empty({batch.num_chunks, batch.length}, torch::kInt64);
  auto* out = ids.data_ptr<int64_t>();
  for (int64_t i = 0; i < batch.num_chunks; ++i) {
    const auto& chunk = corpus.chunks[static_cast<size_t>(batch.first_chunk + i)];
    out = std::copy(chunk.begin(), chunk.end(), out);
  }
  return ids;
}

void run_layer_major(Transformer& model, const TokenChunks& corpus, const RunPlan& plan,
                     RunPosition start, LayerVisitor& visitor, Progress& progress) {
  const torch::InferenceMode inference;
  const TakesItsTime until_layers_end;
  const int num_layers = model.config().num_layers;
  const torch::Device device = model.compute().device;
  LayerLoader weights(model, plan.weights_resident);
  for (const Wave& wave : waves_from(plan, start.batch, start.hidden.size())) {
    const int first_layer = start.hidden.empty() ? 0 : start.layer;
    std::vector<torch::Tensor> hidden = start.hidden.empty() ? embed_wave(model, corpus, plan, wave)
                                                             : std::exchange(start.hidden, {});
    if (!plan.hidden_on_device) {
      for (torch::Tensor& states : hidden) states = pinned(std::move(states), device);
    }
    for (int layer = first_layer; layer < num_layers; ++layer) {
      const LayerWeights& layer_weights = weights.get(layer);
      AttentionObserver* observer = visitor.observer(layer);
      for (size_t i = 0; i < wave.num_batches; ++i) {
        const torch::Tensor input = hidden[i].to(device, /*non_blocking=*/true);
        const torch::Tensor output = model.forward_layer(layer, layer_weights, input, observer);
        if (plan.hidden_on_device) {
          hidden[i] = output;
        } else {
          hidden[i].copy_(output, /*non_blocking=*/true);
        }
        progress.advance(plan.batches[wave.first_batch + i].tokens());
      }
      if (!plan.hidden_on_device) wait_for_stream(device);  // the copies are there, to be saved
      RunPosition next{wave.first_batch, layer + 1, hidden};
      if (next.layer == num_layers) next = {wave.first_batch + wave.num_batches, 0, {}};
      // Asked before the visitor asks: it has then saved where this stops.
      const bool stop = interrupt_requested();
      visitor.layer_done(next);
      // Of activations: what a layer leaves for good lies between them, and with the holes a run
      // would take up to a quarter more than it has in use.
      if (!device.is_cuda()) give_back_freed_memory();
      if (stop) throw Interrupted(kStopped);
    }
  }
}

}  // namespace oscar
