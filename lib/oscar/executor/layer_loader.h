// Weights of one layer after another, the next ones read while the present one computes.
#pragma once

#include <future>
#include <memory>
#include <vector>

#include "oscar/model/transformer.h"

namespace oscar {

// Not for use by two threads.
class LayerLoader {
 public:
  // `resident`: all layers stay once read, on a GPU for the model's later loaders too, until one
  // that is not resident begins; otherwise the present and the next one. One loader of a model at a
  // time is resident on a GPU.
  LayerLoader(Transformer& model, bool resident);
  ~LayerLoader();
  LayerLoader(const LayerLoader&) = delete;
  LayerLoader& operator=(const LayerLoader&) = delete;

  // The weights of `layer`, valid until the next call. On a GPU those of the next one are read from
  // then on. Without `resident` the device has finished with the layer before. Throws as
  // Transformer::load_layer does.
  const LayerWeights& get(int layer);

 private:
  using Weights = std::shared_ptr<const LayerWeights>;

  void load_ahead(int layer);
  void wait_for_device() const;

  const Transformer& model_;
  bool resident_;
  std::vector<Weights> own_;
  std::vector<Weights>& layers_;  // [num_layers], own or the model's; null: not on the device
  int present_ = -1;
  int coming_ = -1;  // the layer that is being read
  std::future<Weights> reading_;
};

}  // namespace oscar
