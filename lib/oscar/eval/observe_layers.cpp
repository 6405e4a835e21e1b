// Layer by layer.
#include "oscar/eval/observe_layers.h"

#include "oscar/base/interrupt.h"
#include "oscar/executor/layer_loader.h"
#include "oscar/int2/cache_engine.h"

namespace oscar {

void observe_layers(Transformer& model, const torch::Tensor& ids, int64_t position_offset,
                    AttentionObserver& observer) {
  auto hidden = model.embed(ids);
  LayerLoader loader(model, /*resident=*/false);
  for (int layer = 0; layer < model.config().num_layers; ++layer) {
    stop_if_requested(kStoppedEvaluation);
    hidden =
        model.forward_layer(layer, loader.get(layer), hidden, &observer, nullptr, position_offset);
  }
}

}  // namespace oscar
