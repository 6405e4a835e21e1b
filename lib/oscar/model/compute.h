// Choice of device and precision from --device and --dtype.
#pragma once

#include <string>

#include "oscar/model/torch.h"

namespace oscar {

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

}  // namespace oscar
