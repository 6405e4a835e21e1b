// From bytes of files to tensors of the compute dtype.
#include "oscar/model/layer_weights.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "oscar/base/error.h"
#include "oscar/base/parallel.h"
#include "oscar/model/copy_numbers.h"
#include "oscar/model/side_by_side.h"
#include "oscar/model/side_stream.h"

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

// Quantized weights from row `from` on into `place`, made on the processor slab by slab: fp32 of a
// whole tensor may not fit beside it.
void decode(const TensorView& view, int64_t from, const torch::Tensor& place) {
  constexpr int64_t kSlabValues = int64_t{1} << 18;
  const torch::Tensor tensor =
      place.is_cuda() ? torch::empty(place.sizes(), place.scalar_type()) : place;
  const int64_t values = view.shape.back(), rows = tensor.numel() / values;
  const torch::Tensor flat = tensor.view({rows, values});
  const int64_t slab = std::max<int64_t>(1, kSlabValues / values);
  side_by_side(rows, slab, [&](int64_t begin, int64_t end) {
    const c10::InferenceMode guard;
    std::vector<float> buffer(static_cast<size_t>(std::min(slab, end - begin) * values));
    for (int64_t first = begin; first < end; first += slab) {
      const int64_t count = std::min(slab, end - first);
      view.decode(from + first, count, buffer.data());
      flat.narrow(0, first, count).copy_(torch::from_blob(buffer.data(), {count, values}));
    }
  });
  if (place.is_cuda()) place.copy_(tensor);
}

// The dtype on the device: a router decides between experts, and rounding would change choices;
// what is near zero in the file loses its last bits where an offset is added.
torch::Dtype dtype_on_device(const WeightSpec& spec, torch::Dtype dtype) {
  using enum WeightRole;
  const bool router = spec.role == kRouter || spec.role == kRouterChoiceBias;
  return router || spec.offset != 0 ? torch::kFloat32 : dtype;
}

// FP8 codes from row `from` on and their scales into `place`, on whose device they are multiplied:
// in slabs, since fp32 of a whole tensor may not fit beside it. Returns whether all are finite.
bool scale_fp8(const ByteReader& read, const TensorView& view, int64_t from,
               const torch::Tensor& place) {
  constexpr int64_t kSlabValues = int64_t{1} << 22;
  const BlockScales& fp8 = *view.fp8;
  const int64_t rows = place.size(0), columns = place.size(1);
  const torch::Device device = place.device();
  const auto blocks_of = [&](int64_t first, int64_t count, int64_t block) {
    return torch::arange(first, first + count, torch::dtype(torch::kInt64).device(device))
        .div(block, /*rounding_mode=*/"floor");
  };
  const torch::Tensor row_block = blocks_of(from, rows, fp8.block_rows);
  const torch::Tensor column_block = blocks_of(0, columns, fp8.block_columns);
  const torch::Tensor scales =
      torch::tensor(fp8.scales, torch::dtype(torch::kFloat32))
          .view({(view.shape[0] - 1) / fp8.block_rows + 1, (columns - 1) / fp8.block_columns + 1})
          .to(device);
  const torch::Tensor codes =
      torch::empty(place.sizes(), torch::dtype(torch::kFloat8_e4m3fn).device(device));
  const bool finite_codes = copy_numbers(read, codes);
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

// Rows of a weight from `from` on, their bytes, and where they belong: contiguous, on the device
// and in the dtype that is wanted.
struct Piece {
  const WeightSpec* spec = nullptr;
  int64_t from = 0;
  StoredBytes stored;
  torch::Tensor place;

  void read_ahead() const { stored.read_ahead(stored.bytes); }
};

// What is asked of the system before it is read: enough that a disk is never idle.
constexpr size_t kAheadBytes = size_t{256} << 20;
constexpr size_t kPieceBytes = size_t{8} << 20;

void read_piece(const WeightSource& weights, const Piece& piece) {
  const WeightSpec& spec = *piece.spec;
  const torch::Tensor& place = piece.place;
  const TensorView view = weights.get(spec.name, spec.shape);
  const auto read = [&](size_t first, size_t bytes, std::byte* out) {
    piece.stored.read(first, bytes, out);
  };
  bool finite = false;
  if (view.fp8) {
    finite = scale_fp8(read, view, piece.from, place);
  } else if (!view.decode && stored_dtype(view.dtype) == place.scalar_type()) {
    finite = copy_numbers(read, place);
  } else {
    if (view.decode) {
      decode(view, piece.from, place);
      piece.stored.release();
    } else {
      const torch::Tensor stored = torch::empty(place.sizes(), stored_dtype(view.dtype));
      read(0, stored.nbytes(), static_cast<std::byte*>(stored.data_ptr()));
      place.copy_(stored);
    }
    finite = torch::isfinite(place).all().item<bool>();
  }
  if (!finite) {
    throw Error({.what = "a weight is not finite",
                 .where = weights.place(spec.name),
                 .expected = "finite numbers",
                 .found = "NaN or infinity",
                 .hint = "the checkpoint is damaged, or too large for this --dtype"});
  }
  if (spec.offset != 0) torch::Tensor(place).add_(spec.offset);
}

// Weights and their places: first all are listed, then pieces of them are read side by side.
class Readings {
 public:
  Readings(const WeightSource& weights, ComputeOptions options)
      : weights_(weights), options_(options) {}

  // `place`: of the weight's shape, filled by read().
  void add(const WeightSpec& spec, const torch::Tensor& place) {
    const int64_t rows = place.size(0);
    const auto pieces = static_cast<int64_t>(place.nbytes() / kPieceBytes) + 1;
    const int64_t most = std::max<int64_t>(1, (rows + pieces - 1) / pieces);
    const StoredBytes all = weights_.stored_bytes(spec.name);
    const size_t row_bytes = all.bytes / static_cast<size_t>(rows);
    for (int64_t from = 0; from < rows; from += most) {
      const int64_t count = std::min(most, rows - from);
      const StoredBytes stored{all.file, all.begin + static_cast<size_t>(from) * row_bytes,
                               static_cast<size_t>(count) * row_bytes};
      pieces_.push_back({&spec, from, stored, place.narrow(0, from, count)});
    }
  }

  // In the order of the files, as a disk likes it best. One thread does not fill the bus to a GPU;
  // all send on the stream of the caller, whose memory the places are.
  void read() {
    constexpr int64_t kReaders = 4;
    constexpr size_t kAhead = kAheadBytes / kPieceBytes;
    std::ranges::stable_sort(pieces_, {}, [](const Piece& piece) { return piece.stored.begin; });
    for (size_t i = 0; i < std::min(kAhead, pieces_.size()); ++i) pieces_[i].read_ahead();
    const auto stream = present_stream(options_.device);
    const auto step = [&](int64_t index) {
      const auto i = static_cast<size_t>(index);
      const InferenceOn guard(stream);
      if (i + kAhead < pieces_.size()) pieces_[i + kAhead].read_ahead();
      read_piece(weights_, pieces_[i]);
    };
    parallel_for(static_cast<int64_t>(pieces_.size()), step, stream ? kReaders : 1);
  }

  torch::Tensor make_place(std::vector<int64_t> shape, torch::Dtype dtype) const {
    return torch::empty(shape, torch::dtype(dtype).device(options_.device));
  }
  torch::Dtype dtype_of(const WeightSpec& spec) const {
    return dtype_on_device(spec, options_.dtype);
  }

 private:
  const WeightSource& weights_;
  ComputeOptions options_;
  std::vector<Piece> pieces_;
};

// Weights of all experts side by side: [num_experts, rows of all roles, columns].
torch::Tensor add_experts(Readings& readings, const std::vector<WeightSpec>& specs,
                          std::initializer_list<WeightRole> roles) {
  int64_t experts = 0, rows = 0, columns = 0;
  const WeightSpec* any = nullptr;
  for (const WeightSpec& spec : specs) {
    if (std::ranges::find(roles, spec.role) == roles.end()) continue;
    any = &spec;
    experts = std::max<int64_t>(experts, spec.expert + 1);
    columns = spec.shape[1];
    if (spec.expert == 0) rows += spec.shape[0];
  }
  if (any == nullptr) return {};
  torch::Tensor stack = readings.make_place({experts, rows, columns}, readings.dtype_of(*any));
  std::vector<int64_t> filled(static_cast<size_t>(experts));
  for (const WeightRole role : roles) {
    for (const WeightSpec& spec : specs) {
      if (spec.role != role) continue;
      int64_t& first = filled[static_cast<size_t>(spec.expert)];
      readings.add(spec, stack[spec.expert].narrow(0, first, spec.shape[0]));
      first += spec.shape[0];
    }
  }
  return stack;
}

// Weights of these roles below each other; undefined when the layer has none.
torch::Tensor add_stack(Readings& readings, const std::vector<WeightSpec>& specs,
                        std::initializer_list<WeightRole> roles) {
  std::vector<const WeightSpec*> parts;
  for (const WeightRole role : roles) {
    const auto found = std::ranges::find_if(
        specs, [&](const WeightSpec& spec) { return spec.role == role && spec.expert < 0; });
    if (found != specs.end()) parts.push_back(&*found);
  }
  if (parts.empty()) return {};
  std::vector<int64_t> shape = parts.front()->shape;
  shape[0] = 0;
  for (const WeightSpec* spec : parts) shape[0] += spec->shape[0];
  torch::Tensor whole = readings.make_place(shape, readings.dtype_of(*parts.front()));
  int64_t first = 0;
  for (const WeightSpec* spec : parts) {
    readings.add(*spec, whole.narrow(0, first, spec->shape[0]));
    first += spec->shape[0];
  }
  return whole;
}

}  // namespace

torch::Tensor load_weight(const WeightSource& weights, const WeightSpec& spec,
                          const ComputeOptions& options) {
  Readings readings(weights, options);
  torch::Tensor tensor = readings.make_place(spec.shape, readings.dtype_of(spec));
  readings.add(spec, tensor);
  readings.read();
  return tensor;
}

LayerWeights load_layer_weights(const WeightSource& weights, const std::vector<WeightSpec>& specs,
                                const ComputeOptions& options) {
  Readings readings(weights, options);
  const auto stack = [&](std::initializer_list<WeightRole> roles) {
    return add_stack(readings, specs, roles);
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
  layer.expert_gate_up = add_experts(readings, specs, {kExpertGate, kExpertUp});
  layer.expert_down = add_experts(readings, specs, {kExpertDown});
  readings.read();
  return layer;
}

void read_ahead(const WeightSource& weights, const std::vector<WeightSpec>& specs) {
  std::vector<StoredBytes> stored;
  for (const WeightSpec& spec : specs) stored.push_back(weights.stored_bytes(spec.name));
  std::ranges::sort(stored, {}, &StoredBytes::begin);
  size_t left = kAheadBytes;
  for (const StoredBytes& tensor : stored) {
    const size_t bytes = std::min(left, tensor.bytes);
    tensor.read_ahead(bytes);
    left -= bytes;
  }
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
