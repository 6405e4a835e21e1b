// One decoder-only transformer for every supported family, run layer by layer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "oscar/checkpoint/checkpoint.h"
#include "oscar/linalg/tensor.h"
#include "oscar/model/compute.h"
#include "oscar/model/observer.h"
#include "oscar/model/torch.h"

namespace oscar {

// Replaces the attention of one layer (INT2 evaluation): from q, k, v as in AttentionRecord to o.
class AttentionEngine {
 public:
  virtual ~AttentionEngine() = default;
  virtual torch::Tensor attend(int layer, const torch::Tensor& q, const torch::Tensor& k,
                               const torch::Tensor& v, double sm_scale) = 0;
};

// Weights of one layer on the device (layer_weights.h; names in the file: weight_table.h).
struct LayerWeights;

class Transformer {
 public:
  // Keeps a reference to the checkpoint, which must outlive it. Loads nothing yet, but throws Error
  // when a tensor is missing, of another shape, or not accounted for. Not for use by two threads.
  Transformer(const Checkpoint& checkpoint, ComputeOptions options);
  ~Transformer();

  const ModelConfig& config() const;
  const ComputeOptions& compute() const;

  // ids [batch, tokens] int64 on any device -> hidden [batch, tokens, hidden_size].
  torch::Tensor embed(const torch::Tensor& ids);

  // Loads one layer's weights onto the device; another thread may run layers meanwhile. Throws
  // Error naming a missing tensor, a wrong shape or a tensor with non-finite values.
  std::shared_ptr<const LayerWeights> load_layer(int layer) const;
  // Has the system begin to read what load_layer will ask for.
  void read_ahead(int layer) const;
  // Layers that stay on the device from one pass to the next, null where none does: [num_layers].
  // Filled and emptied by executor/layer_loader.h.
  std::vector<std::shared_ptr<const LayerWeights>>& kept_layers();
  // Bytes that load_layer puts on the device.
  size_t layer_bytes(int layer) const;

  // hidden -> hidden through one layer; positions are position_offset .. + tokens - 1.
  // The observer sees what attention used. `engine` replaces the attention itself.
  torch::Tensor forward_layer(int layer, const LayerWeights& weights, const torch::Tensor& hidden,
                              AttentionObserver* observer = nullptr,
                              AttentionEngine* engine = nullptr, int64_t position_offset = 0) const;

  // Final norm and output projection: hidden [batch, tokens, hidden] -> logits fp32 [.., vocab].
  torch::Tensor logits(const torch::Tensor& hidden);

  // M_O = sum over the query heads j of a KV head of W_O,j W_O,j^T, [Hkv, d, d], in float64 from
  // weights in the compute dtype; W_O,j is the [head_dim_v, hidden] slice of query head j.
  MatrixStack<double> o_proj_metric(int layer) const;
  // W_O,j W_O,j^T of every query head, [Hq, d, d]: what the sum above is made of.
  MatrixStack<double> o_proj_head_metrics(int layer) const;

 private:
  MatrixStack<double> output_metrics(int layer, int joined) const;

  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace oscar
