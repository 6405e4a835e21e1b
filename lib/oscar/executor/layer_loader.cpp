// Threads that read and copy on streams of their own.
#include "oscar/executor/layer_loader.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "oscar/model/side_stream.h"

namespace oscar {
namespace {

constexpr int kSideBySide = 3;  // layers read together: one thread does not fill the bus
static_assert(kLoadingStreams + kSideBySide <= kSumsStream);

}  // namespace

LayerLoader::LayerLoader(Transformer& model, bool resident)
    : model_(model),
      resident_(resident),
      own_(static_cast<size_t>(model.config().num_layers)),
      layers_(resident && model.compute().device.is_cuda() ? model.kept_layers() : own_) {
  if (resident) return;
  for (auto& kept : model.kept_layers()) {
    if (kept) kept = nullptr;  // nothing is written where there is none: others may be looking
  }
}

LayerLoader::~LayerLoader() {
  for (auto& [layer, weights] : coming_) weights.wait();
  try {
    wait_for_device();               // before memory that it may read from is another's
  } catch (const std::exception&) {  // whoever asks the device next is told
  }
}

void LayerLoader::wait_for_device() const {
  const torch::Device device = model_.compute().device;
  if (device.is_cuda()) wait_for_stream(device);
}

void LayerLoader::load_ahead(int first) {
  const torch::Device device = model_.compute().device;
  if (!device.is_cuda()) return;
  const int end = std::min(first + (resident_ ? kSideBySide : 1), model_.config().num_layers);
  for (int layer = first; layer < end; ++layer) {
    if (layers_[static_cast<size_t>(layer)] || coming_.contains(layer)) continue;
    coming_[layer] = std::async(std::launch::async, [this, layer, device] {
      // Layers in a row take the streams in turn; without `resident` there is one at a time.
      const int turn = resident_ ? layer % kSideBySide : 0;
      const c10::Stream stream = side_stream(device, kLoadingStreams + turn);
      const c10::StreamGuard guard(stream);
      Weights weights = model_.load_layer(layer);
      stream.synchronize();
      return weights;
    });
  }
}

const LayerWeights& LayerLoader::get(int layer) {
  if (!resident_ && present_ >= 0 && present_ != layer) {
    wait_for_device();
    layers_[static_cast<size_t>(present_)].reset();
  }
  present_ = layer;
  Weights& slot = layers_[static_cast<size_t>(layer)];
  if (const auto coming = coming_.extract(layer)) slot = coming.mapped().get();
  if (!resident_) coming_.clear();  // of a layer that is not the next one after all
  if (!slot) slot = model_.load_layer(layer);
  load_ahead(layer + 1);
  return *slot;
}

}  // namespace oscar
