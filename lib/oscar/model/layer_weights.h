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
  torch::Tensor attention_norm, mlp_norm;                // [hidden], before each half
  torch::Tensor attention_output_norm, mlp_output_norm;  // [hidden], behind each half
  torch::Tensor qkv, qkv_bias;   // [(num_qo_heads + 2 num_kv_heads) * head_dim, hidden], [rows]
  torch::Tensor q_norm, k_norm;  // [head_dim]
  torch::Tensor o, o_bias;       // [hidden, num_qo_heads * head_dim], [hidden]
  // Of the MLP, or of the expert that all tokens share.
  torch::Tensor gate_up, gate_up_bias;  // [2 * intermediate, hidden], [2 * intermediate]
  torch::Tensor down, down_bias;        // [hidden, intermediate], [hidden]
  // Of a layer with experts. The router is in fp32 whatever the compute dtype is.
  torch::Tensor router, choice_bias;  // [num_experts, hidden], [num_experts]
  torch::Tensor expert_gate_up;       // [num_experts, 2 * intermediate, hidden]
  torch::Tensor expert_down;          // [num_experts, hidden, intermediate]
};

// Copies one tensor to the device, with the spec's offset added. For a GPU several threads read
// parts of it, and it is filled once the present stream gets there. Throws Error naming it when it
// is missing, of another shape, or holds a NaN or an infinity, and when its file is cut short.
torch::Tensor load_weight(const WeightSource& weights, const WeightSpec& spec,
                          const ComputeOptions& options);

// Those of a layer likewise. `specs`: its own (weight_table.h).
LayerWeights load_layer_weights(const WeightSource& weights, const std::vector<WeightSpec>& specs,
                                const ComputeOptions& options);

// Has the system begin to read them from their files, as far as it takes to have them when they are
// loaded next.
void read_ahead(const WeightSource& weights, const std::vector<WeightSpec>& specs);

// Bytes that load_layer_weights puts on the device.
size_t layer_weight_bytes(const std::vector<WeightSpec>& specs, torch::Dtype dtype);

}  // namespace oscar
