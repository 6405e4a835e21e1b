// From mapped bytes to tensors of the compute dtype.
#include "oscar/model/layer_weights.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "oscar/base/error.h"
#include "oscar/model/copy_numbers.h"
#include "oscar/model/side_by_side.h"

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

// Rows of quantized weights into `place`, made on the processor slab by slab: fp32 of a whole
// tensor may not fit beside it.
void decode(const TensorView& view, const torch::Tensor& place) {
  constexpr int64_t kSlabValues = int64_t{1} << 18;
  const torch::Tensor tensor =
      place.is_cuda() ? torch::empty(view.shape, place.scalar_type()) : place;
  const int64_t values = view.shape.back(), rows = tensor.numel() / values;
  const torch::Tensor flat = tensor.view({rows, values});
  const int64_t slab = std::max<int64_t>(1, kSlabValues / values);
  side_by_side(rows, slab, [&](int64_t begin, int64_t end) {
    const c10::InferenceMode guard;
    std::vector<float> buffer(static_cast<size_t>(std::min(slab, end - begin) * values));
    for (int64_t first = begin; first < end; first += slab) {
      const int64_t count = std::min(slab, end - first);
      view.decode(first, count, buffer.data());
      flat.narrow(0, first, count).copy_(torch::from_blob(buffer.data(), {count, values}));
    }
  });
  if (place.is_cuda()) place.copy_(tensor);
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

// The dtype on the device: a router decides between experts, and rounding would change choices;
// what is near zero in the file loses its last bits where an offset is added.
torch::Dtype dtype_on_device(const WeightSpec& spec, torch::Dtype dtype) {
  using enum WeightRole;
  const bool router = spec.role == kRouter || spec.role == kRouterChoiceBias;
  return router || spec.offset != 0 ? torch::kFloat32 : dtype;
}

// FP8 codes and their scales into `place`, on whose device they are multiplied: in slabs, since
// fp32 of a whole tensor may not fit beside it. Returns whether all are finite.
bool scale_fp8(const TensorView& view, const torch::Tensor& place) {
  constexpr int64_t kSlabValues = int64_t{1} << 22;
  const BlockScales& fp8 = *view.fp8;
  const int64_t rows = view.shape[0], columns = view.shape[1];
  const torch::Device device = place.device();
  const auto blocks_of = [&](int64_t size, int64_t block) {
    return torch::arange(size, torch::dtype(torch::kInt64).device(device))
        .div(block, /*rounding_mode=*/"floor");
  };
  const torch::Tensor row_block = blocks_of(rows, fp8.block_rows);
  const torch::Tensor column_block = blocks_of(columns, fp8.block_columns);
  const torch::Tensor scales =
      torch::tensor(fp8.scales, torch::dtype(torch::kFloat32))
          .view({(rows - 1) / fp8.block_rows + 1, (columns - 1) / fp8.block_columns + 1})
          .to(device);
  const torch::Tensor codes =
      torch::empty(view.shape, torch::dtype(torch::kFloat8_e4m3fn).device(device));
  const bool finite_codes = copy_numbers(view.data, codes);
  const int64_t slab = std::max<int64_t>(1, kSlabValues / columns);
  for (int64_t first = 0; first < rows; first += slab) {
    const int64_t count = std::min(slab, rows - first);
    torch::Tensor factors = scales.index_select(0, row_block.narrow(0, first, count));
    if (scales.size(1) > 1) factors = factors.index_select(1, column_block);
    place.narrow(0, first, count)
        .copy_(codes.narrow(0, first, count).to(torch::kFloat32).mul_(factors));
  }
  // No code is above 448, so that products of such scales are finite in fp32 and bf16.
  constexpr float kHarmless = 1e30f;
  const bool harmless =
      std::ranges::all_of(fp8.scales, [](float scale) { return std::abs(scale) <= kHarmless; });
  return finite_codes && (harmless || torch::isfinite(place).all().item<bool>());
}

// Fills `place`, contiguous and of the weight's shape, on its device and in its dtype.
void read_weight(const WeightSource& weights, const WeightSpec& spec, const torch::Tensor& place) {
  const TensorView view = weights.get(spec.name, spec.shape);
  bool finite = false;
  if (view.fp8) {
    finite = scale_fp8(view, place);
  } else if (!view.decode && stored_dtype(view.dtype) == place.scalar_type()) {
    finite = copy_numbers(view.data, place);
  } else {
    if (view.decode) {
      decode(view, place);
    } else {
      place.copy_(wrap(view));
    }
    finite = torch::isfinite(place).all().item<bool>();
  }
  weights.release(view);
  if (!finite) {
    throw Error({.what = "a weight is not finite",
                 .where = weights.place(spec.name),
                 .expected = "finite numbers",
                 .found = "NaN or infinity",
                 .hint = "the checkpoint is damaged, or too large for this --dtype"});
  }
  if (spec.offset != 0) torch::Tensor(place).add_(spec.offset);
}

// Weights of all experts side by side, each read straight into its place.
class ExpertStack {
 public:
  ExpertStack(const WeightSource& weights, const std::vector<WeightSpec>& specs,
              const ComputeOptions& options)
      : weights_(weights), specs_(specs), options_(options) {}

  // [num_experts, rows of all roles, columns].
  torch::Tensor read(std::initializer_list<WeightRole> roles) const {
    int64_t experts = 0, rows = 0, columns = 0;
    for (const WeightSpec& spec : specs_) {
      if (std::ranges::find(roles, spec.role) == roles.end()) continue;
      experts = std::max<int64_t>(experts, spec.expert + 1);
      columns = spec.shape[1];
      if (spec.expert == 0) rows += spec.shape[0];
    }
    if (experts == 0) return {};
    const torch::Tensor stack = torch::empty({experts, rows, columns},
                                             torch::dtype(options_.dtype).device(options_.device));
    std::vector<int64_t> filled(static_cast<size_t>(experts));
    for (const WeightRole role : roles) {
      for (const WeightSpec& spec : specs_) {
        if (spec.role != role) continue;
        int64_t& first = filled[static_cast<size_t>(spec.expert)];
        read_weight(weights_, spec, stack[spec.expert].narrow(0, first, spec.shape[0]));
        first += spec.shape[0];
      }
    }
    return stack;
  }

 private:
  const WeightSource& weights_;
  const std::vector<WeightSpec>& specs_;
  const ComputeOptions& options_;
};

}  // namespace

torch::Tensor load_weight(const WeightSource& weights, const WeightSpec& spec, torch::Device device,
                          torch::Dtype dtype) {
  if (spec.offset != 0) dtype = torch::kFloat32;
  torch::Tensor tensor = torch::empty(spec.shape, torch::dtype(dtype).device(device));
  read_weight(weights, spec, tensor);
  return tensor;
}

LayerWeights load_layer_weights(const WeightSource& weights, const std::vector<WeightSpec>& specs,
                                const ComputeOptions& options) {
  const auto spec_of = [&](WeightRole role) {
    const auto found = std::ranges::find_if(
        specs, [&](const WeightSpec& spec) { return spec.role == role && spec.expert < 0; });
    return found == specs.end() ? nullptr : &*found;
  };
  // Parts of a stack are read into their place one at a time.
  const auto stack = [&](std::initializer_list<WeightRole> roles) -> torch::Tensor {
    std::vector<const WeightSpec*> parts;
    for (const WeightRole role : roles) {
      if (const WeightSpec* spec = spec_of(role)) parts.push_back(spec);
    }
    if (parts.empty()) return {};
    std::vector<int64_t> shape = parts.front()->shape;
    shape[0] = 0;
    for (const WeightSpec* spec : parts) shape[0] += spec->shape[0];
    torch::Tensor whole = torch::empty(
        shape, torch::dtype(dtype_on_device(*parts.front(), options.dtype)).device(options.device));
    int64_t first = 0;
    for (const WeightSpec* spec : parts) {
      read_weight(weights, *spec, whole.narrow(0, first, spec->shape[0]));
      first += spec->shape[0];
    }
    return whole;
  };
  using enum WeightRole;
  LayerWeights layer;
  layer.attention_norm = stack({kAttentionNorm});
  layer.attention_output_norm = stack({kAttentionOutputNorm});
  layer.mlp_norm = stack({kMlpNorm});
  layer.mlp_output_norm = stack({kMlpOutputNorm});
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
  layer.router = stack({kRouter});
  layer.choice_bias = stack({kRouterChoiceBias});
  const ExpertStack experts(weights, specs, options);
  layer.expert_gate_up = experts.read({kExpertGate, kExpertUp});
  layer.expert_down = experts.read({kExpertDown});
  return layer;
}

size_t layer_weight_bytes(const std::vector<WeightSpec>& specs, torch::Dtype dtype) {
  size_t total = 0;
  for (const WeightSpec& spec : specs) {
    size_t bytes = torch::elementSize(dtype_on_device(spec, dtype));
    for (const int64_t size : spec.shape) bytes *= static_cast<size_t>(size);
    total += bytes;
  }
  return total;
}

}  // namespace oscar
