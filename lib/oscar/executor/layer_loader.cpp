// A thread that reads and copies on a stream of its own.
#include "oscar/executor/layer_loader.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace oscar {
namespace {

// One for all loaders: memory that a stream has given back serves that stream again.
c10::Stream loading_stream(torch::Device device) {
  static const c10::Stream stream =
      c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  return stream;
}

}  // namespace

LayerLoader::LayerLoader(const Transformer& model, bool resident)
    : model_(model), resident_(resident), layers_(static_cast<size_t>(model.config().num_layers)) {}

LayerLoader::~LayerLoader() {
  if (next_.valid()) next_.wait();
  try {
    wait_for_device();               // before memory that it may read from is another's
  } catch (const std::exception&) {  // whoever asks the device next is told
  }
}

void LayerLoader::wait_for_device() const {
  const torch::Device device = model_.compute().device;
  if (!device.is_cuda()) return;
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

void LayerLoader::load_ahead(int layer) {
  const torch::Device device = model_.compute().device;
  if (!device.is_cuda() || layer >= model_.config().num_layers) return;
  if (layers_[static_cast<size_t>(layer)]) return;
  next_layer_ = layer;
  next_ = std::async(std::launch::async, [this, layer, device] {
    const c10::Stream stream = loading_stream(device);
    const c10::StreamGuard guard(stream);
    Weights weights = model_.load_layer(layer);
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
  if (next_.valid()) {
    Weights read = next_.get();
    if (next_layer_ == layer) slot = std::move(read);
  }
  if (!slot) slot = model_.load_layer(layer);
  load_ahead(layer + 1);
  return *slot;
}

}  // namespace oscar
