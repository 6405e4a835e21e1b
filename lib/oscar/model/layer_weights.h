// Weights of a layer on their way to the device.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "oscar/io/weight_source.h"
#include "oscar/model/checkpoint/weights.h"
#include "oscar/model/torch.h"

namespace oscar {

// Choice of device and precision from --device and --dtype.

// Where and in which precision the model runs.
struct ComputeOptions {
  torch::Device device = torch::kCPU;
  torch::Dtype dtype = torch::kFloat32;  // weights and activations; norms and softmax in fp32
};

// device: "auto", "cpu", "cuda" or "cuda:i"; dtype: "auto", "bf16" or "fp32". auto = CUDA with bf16
// when a GPU is usable, else CPU with fp32. Throws Error when CUDA was asked for and is not there,
// and when an NVIDIA GPU is present whose driver is too old for this libtorch (both versions
// named): never a silent run on the CPU then.
ComputeOptions choose_compute(const std::string& device, const std::string& dtype);

// "cuda:0 (NVIDIA H200), bf16" for logs and reports.
std::string describe(const ComputeOptions& options);

// Numbers from a file into a tensor, looked through on the way.

// Writes bytes first .. first + bytes - 1 to `out`.
using ByteReader = std::function<void(size_t first, size_t bytes, std::byte* out)>;

// Fills `place`, contiguous, of bf16, fp16, fp32 or FP8 (E4M3) on any device, with as many numbers
// of its type. Returns whether all are finite. On a GPU they pass through pinned memory, which is
// three times as fast as a copy from the file's pages, and need no kernel there: beside a forward
// pass each would wait for the products in progress. All has been read when this returns, and
// `place` is filled once the stream gets there.
bool copy_numbers(const ByteReader& read, const torch::Tensor& place);

// Weights on the device, read from the checkpoint and checked for non-finite values.

// Of a linear layer (DeltaNetSpec).
struct DeltaNetWeights {
  torch::Tensor in;                 // [input_rows, hidden]: q, k, v, z, beta and decay
  torch::Tensor conv;               // [channels, taps]
  torch::Tensor log_rate, dt_bias;  // [num_value_heads] float32
  torch::Tensor norm;               // [value_dim]
  torch::Tensor out;                // [hidden, value_rows]
};

// One layer on the device in the compute dtype. Projections that read the same input are stacked,
// so that each is one product. Undefined tensors: the model has no such weight.
struct LayerWeights {
  torch::Tensor attention_norm, mlp_norm;                // [hidden], before each half
  torch::Tensor attention_output_norm, mlp_output_norm;  // [hidden], behind each half
  torch::Tensor qkv, qkv_bias;   // [(num_qo_heads + 2 num_kv_heads) * head_dim, hidden], [rows]
  torch::Tensor o_gate;          // [num_qo_heads * head_dim, hidden], where outputs are gated
  torch::Tensor q_norm, k_norm;  // [head_dim], of a joint norm [num_qo_heads * head_dim], ..
  torch::Tensor o, o_bias;       // [hidden, num_qo_heads * head_dim], [hidden]
  // Of the MLP, or of the expert that all tokens share.
  torch::Tensor gate_up, gate_up_bias;  // [2 * intermediate, hidden], [2 * intermediate]
  torch::Tensor down, down_bias;        // [hidden, intermediate], [hidden]
  // Of a layer with experts. The router is in fp32 whatever the compute dtype is.
  torch::Tensor router, choice_bias;  // [num_experts, hidden], [num_experts]
  torch::Tensor expert_gate_up;       // [num_experts, 2 * intermediate, hidden]
  torch::Tensor expert_down;          // [num_experts, hidden, intermediate]
  torch::Tensor shared_gate;          // [1, hidden]
  DeltaNetWeights delta_net;
};

// Copies one tensor to the device, with the spec's offset added. For a GPU several threads read
// parts of it, and it is filled once the present stream gets there. Throws Error naming it when it
// is missing, of another shape, or holds a NaN or an infinity, and when its file is cut short.
torch::Tensor load_weight(const WeightSource& weights, const WeightSpec& spec,
                          const ComputeOptions& options);

// Those of a layer likewise, its rows in the order of LayerWeights. `specs`: its own (weights.h).
LayerWeights load_layer_weights(const WeightSource& weights, const std::vector<WeightSpec>& specs,
                                const ModelConfig& config, int layer,
                                const ComputeOptions& options);

// Has the system begin to read them from their files, as far as it takes to have them when they are
// loaded next.
void read_ahead(const WeightSource& weights, const std::vector<WeightSpec>& specs);

// Bytes that load_layer_weights puts on the device.
size_t layer_weight_bytes(const std::vector<WeightSpec>& specs, torch::Dtype dtype);

}  // namespace oscar
