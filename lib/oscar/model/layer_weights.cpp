// From mapped bytes to tensors of the compute dtype.
#include "oscar/model/layer_weights.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>

#include "oscar/base/error.h"

namespace oscar {
namespace {

torch::Dtype stored_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return torch::kBFloat16;
    case Dtype::kFp16:
      return torch::kFloat16;
    case Dtype::kFp32:
      return torch::kFloat32;
  }
  return torch::kFloat32;
}

// Rows of quantized weights in the wanted dtype, made slab by slab: fp32 of a whole tensor may not
// fit beside it.
torch::Tensor decode(const TensorView& view, torch::Dtype dtype) {
  constexpr int64_t kSlabValues = int64_t{1} << 18;
  torch::Tensor tensor = torch::empty(view.shape, dtype);
  const int64_t values = view.shape.back(), rows = tensor.numel() / values;
  const torch::Tensor flat = tensor.view({rows, values});
  const int64_t slab = std::max<int64_t>(1, kSlabValues / values);
  at::parallel_for(0, rows, slab, [&](int64_t begin, int64_t end) {
    const c10::InferenceMode guard;
    std::vector<float> buffer(static_cast<size_t>(std::min(slab, end - begin) * values));
    for (int64_t first = begin; first < end; first += slab) {
      const int64_t count = std::min(slab, end - first);
      view.decode(first, count, buffer.data());
      flat.narrow(0, first, count).copy_(torch::from_blob(buffer.data(), {count, values}));
    }
  });
  return tensor;
}

// The bytes of the file as a tensor; headers need not align them, and then they are copied first.
torch::Tensor wrap(const TensorView& view) {
  const auto dtype = stored_dtype(view.dtype);
  if (reinterpret_cast<uintptr_t>(view.data) % dtype_bytes(view.dtype) == 0) {
    return torch::from_blob(const_cast<std::byte*>(view.data), view.shape, dtype);
  }
  torch::Tensor copy = torch::empty(view.shape, dtype);
  std::memcpy(copy.data_ptr(), view.data, view.bytes);
  return copy;
}

}  // namespace

torch::Tensor load_weight(const WeightSource& weights, const WeightSpec& spec, torch::Device device,
                          torch::Dtype dtype) {
  const TensorView view = weights.get(spec.name, spec.shape);
  const torch::Tensor tensor =
      view.decode ? decode(view, dtype).to(device)
                  : wrap(view).to(device, dtype, /*non_blocking=*/false, /*copy=*/true);
  weights.release(view);
  if (!torch::isfinite(tensor).all().item<bool>()) {
    throw Error({.what = "a weight is not finite",
                 .where = weights.place(spec.name),
                 .expected = "finite numbers",
                 .found = "NaN or infinity",
                 .hint = "the checkpoint is damaged, or too large for this --dtype"});
  }
  return tensor;
}

LayerWeights load_layer_weights(const WeightSource& weights, const std::vector<WeightSpec>& specs,
                                const ComputeOptions& options) {
  std::map<WeightRole, torch::Tensor> by_role;
  for (const WeightSpec& spec : specs) {
    by_role[spec.role] = load_weight(weights, spec, options.device, options.dtype);
  }
  // Removes what it stacks, so that no weight stays on the device twice.
  const auto stack = [&](std::initializer_list<WeightRole> roles) {
    std::vector<torch::Tensor> parts;
    for (const WeightRole role : roles) {
      if (const auto found = by_role.extract(role)) parts.push_back(found.mapped());
    }
    if (parts.empty()) return torch::Tensor();
    return parts.size() == 1 ? parts[0] : torch::cat(parts, 0);
  };
  using enum WeightRole;
  LayerWeights layer;
  layer.attention_norm = stack({kAttentionNorm});
  layer.mlp_norm = stack({kMlpNorm});
  layer.qkv = stack({kQ, kK, kV});
  layer.qkv_bias = stack({kQBias, kKBias, kVBias});
  layer.q_norm = stack({kQNorm});
  layer.k_norm = stack({kKNorm});
  layer.o = stack({kO});
  layer.o_bias = stack({kOBias});
  layer.gate_up = stack({kGate, kUp});
  layer.gate_up_bias = stack({kGateBias, kUpBias});
  layer.down = stack({kDown});
  layer.down_bias = stack({kDownBias});
  return layer;
}

}  // namespace oscar
