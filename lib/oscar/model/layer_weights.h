// Weights on the device, read from the checkpoint and checked for non-finite values.
#pragma once

#include <vector>

#include "oscar/checkpoint/weight_table.h"
#include "oscar/io/weight_source.h"
#include "oscar/model/compute.h"
#include "oscar/model/torch.h"

namespace oscar {

// One layer on the device in the compute dtype. Projections that read the same input are stacked,
// so that each is one product. Undefined tensors: the model has no such weight.
struct LayerWeights {
  torch::Tensor attention_norm, mlp_norm;  // [hidden]
  torch::Tensor qkv, qkv_bias;   // [(num_qo_heads + 2 num_kv_heads) * head_dim, hidden], [rows]
  torch::Tensor q_norm, k_norm;  // [head_dim]
  torch::Tensor o, o_bias;       // [hidden, num_qo_heads * head_dim], [hidden]
  torch::Tensor gate_up, gate_up_bias;  // [2 * intermediate, hidden], [2 * intermediate]
  torch::Tensor down, down_bias;        // [hidden, intermediate], [hidden]
};

// Copies one tensor to the device and lets go of its pages. Throws Error naming it when it is
// missing, of another shape, or holds a NaN or an infinity.
torch::Tensor load_weight(const WeightSource& weights, const WeightSpec& spec, torch::Device device,
                          torch::Dtype dtype);

LayerWeights load_layer_weights(const WeightSource& weights, const std::vector<WeightSpec>& specs,
                                const ComputeOptions& options);

}  // namespace oscar
