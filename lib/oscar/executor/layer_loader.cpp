// A thread that reads and copies on a stream of its own.
#include "oscar/executor/layer_loader.h"

#include <c10/core/StreamGuard.h>

#include "oscar/model/side_stream.h"

namespace oscar {

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
  if (reading_.valid()) reading_.wait();
  try {
    wait_for_device();               // before memory that it may read from is another's
  } catch (const std::exception&) {  // whoever asks the device next is told
  }
}

void LayerLoader::wait_for_device() const {
  const torch::Device device = model_.compute().device;
  if (device.is_cuda()) wait_for_stream(device);
}

void LayerLoader::load_ahead(int layer) {
  const torch::Device device = model_.compute().device;
  if (!device.is_cuda() || layer >= model_.config().num_layers) return;
  if (layers_[static_cast<size_t>(layer)] || reading_.valid()) return;
  coming_ = layer;
  reading_ = std::async(std::launch::async, [this, layer, device] {
    const c10::Stream stream = side_stream(device, kLoadingStream);
    const c10::StreamGuard guard(stream);
    Weights weights = model_.load_layer(layer);
    // Until the next one is asked for, the disk would rest.
    if (layer + 1 < model_.config().num_layers) model_.read_ahead(layer + 1);
    stream.synchronize();
    return weights;
  });
}

const LayerWeights& LayerLoader::get(int layer) {
  if (!resident_ && present_ >= 0 && present_ != layer) {
    wait_for_device();
    layers_[static_cast<size_t>(present_)].reset();
  }
  present_ = layer;
  Weights& slot = layers_[static_cast<size_t>(layer)];
  if (reading_.valid() && coming_ != layer + 1) {
    Weights weights = reading_.get();
    if (coming_ == layer || resident_) layers_[static_cast<size_t>(coming_)] = std::move(weights);
  }
  if (!slot) slot = model_.load_layer(layer);
  load_ahead(layer + 1);
  return *slot;
}

}  // namespace oscar
