// Weights of a layer on their way to the device.
#include "oscar/model/layer_weights.h"

#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <torch/version.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/model/delta_net.h"
#include "oscar/model/device.h"
#include "oscar/model/side_by_side.h"

namespace oscar {

// Device and precision, and a look at the driver before "auto" settles for the CPU.

namespace {

// First line of the loaded NVIDIA driver's version file, if a driver is loaded.
std::optional<std::string> nvidia_driver() {
  std::ifstream stream("/proc/driver/nvidia/version");
  std::string line;
  if (!std::getline(stream, line)) return std::nullopt;
  return line;
}

// Devices that libtorch can use. The half of libtorch that drives them, 350 MiB of memory and a
// quarter of a program's start, is loaded where there is a driver for it, and before anything asks
// torch for a device: torch remembers whether it was there.
int cuda_device_count() {
  if (dlopen("libcuda.so.1", RTLD_LAZY) == nullptr) return 0;
  dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_GLOBAL);  // a libtorch for the CPU has none
  return static_cast<int>(torch::cuda::device_count());
}

[[noreturn]] void refuse_cuda(const std::string& driver) {
  throw Error({.what = "libtorch cannot use the NVIDIA GPU",
               .where = "--device",
               .expected = fmt::format("a driver for libtorch {} built for CUDA 13", TORCH_VERSION),
               .found = driver,
               .hint = "update the driver, or run on the CPU with --device cpu"});
}

torch::Device choose_device(const std::string& device) {
  if (device == "cpu") return torch::kCPU;
  if (device != "auto" && device != "cuda" && device.rfind("cuda:", 0) != 0) {
    throw Error({.what = "unknown device",
                 .where = "--device",
                 .expected = "auto, cpu, cuda or cuda:INDEX",
                 .found = device});
  }
  const int count = cuda_device_count();
  if (count == 0) {
    if (const auto driver = nvidia_driver()) refuse_cuda(*driver);
    if (device == "auto") return torch::kCPU;
    throw Error({.what = "no CUDA device was found",
                 .where = "--device " + device,
                 .hint = "use --device cpu, or check that nvidia-smi lists the GPU"});
  }
  int index = 0;
  if (device.rfind("cuda:", 0) == 0) {
    const std::string digits = device.substr(5);
    if (digits.empty() || digits.size() > 3 ||
        digits.find_first_not_of("0123456789") != std::string::npos || std::stoi(digits) >= count) {
      throw Error({.what = "no such CUDA device",
                   .where = "--device",
                   .expected = fmt::format("cuda:0 to cuda:{}", count - 1),
                   .found = device});
    }
    index = std::stoi(digits);
  }
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

}  // namespace

ComputeOptions choose_compute(const std::string& device, const std::string& dtype) {
  ComputeOptions options;
  options.device = choose_device(device);
  if (dtype == "auto") {
    options.dtype = options.device.is_cuda() ? torch::kBFloat16 : torch::kFloat32;
  } else if (dtype == "bf16" || dtype == "fp32") {
    options.dtype = dtype == "bf16" ? torch::kBFloat16 : torch::kFloat32;
  } else {
    throw Error({.what = "unknown compute precision",
                 .where = "--dtype",
                 .expected = "auto, bf16 or fp32",
                 .found = dtype});
  }
  return options;
}

std::string describe(const ComputeOptions& options) {
  return fmt::format("{}, {}", options.device.str(),
                     options.dtype == torch::kBFloat16 ? "bf16" : "fp32");
}

// Pieces that fit a cache: copied, then looked through.

namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;

// Pinned memory of two pieces: one is filled while the other is on its way.
class Staging {
 public:
  Staging()
      : memory_(torch::empty({2, kPieceBytes}, torch::dtype(torch::kUInt8).pinned_memory(true))) {}

  // One that nothing reads from any more.
  torch::Tensor next(int64_t bytes) {
    turn_ = 1 - turn_;
    left_[turn_].synchronize();
    return memory_[turn_].narrow(0, 0, bytes);
  }
  // The last one, to a place of as many bytes on a GPU.
  void send(const torch::Tensor& part) {
    part.copy_(memory_[turn_].narrow(0, 0, part.numel()), /*non_blocking=*/true);
    const c10::impl::VirtualGuardImpl device_type(c10::DeviceType::CUDA);
    left_[turn_].record(device_type.getStream(part.device()));
  }

 private:
  torch::Tensor memory_;
  c10::Event left_[2] = {c10::Event(c10::DeviceType::CUDA), c10::Event(c10::DeviceType::CUDA)};
  int turn_ = 0;
};

// Lent to one caller after another, and kept to the end of the process: beside kernels in progress
// making one takes longer than copying a layer.
class StagingPool {
 public:
  std::unique_ptr<Staging> take() {
    const std::lock_guard lock(guard_);
    if (free_.empty()) return std::make_unique<Staging>();
    auto staging = std::move(free_.back());
    free_.pop_back();
    return staging;
  }
  void give_back(std::unique_ptr<Staging> staging) {
    const std::lock_guard lock(guard_);
    free_.push_back(std::move(staging));
  }

 private:
  std::mutex guard_;
  std::vector<std::unique_ptr<Staging>> free_;
};

StagingPool& staging_pool() {
  static auto* const pool = new StagingPool;  // outlives the driver, which ends before statics do
  return *pool;
}

// Of numbers that are finite, no exponent (in FP8: nothing but the sign) has all bits of `mask`
// set.
template <typename Word>
bool all_finite(const std::byte* numbers, int64_t count, Word mask) {
  unsigned found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, numbers + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    found |= static_cast<unsigned>((word & mask) == mask);
  }
  return found == 0;
}

bool all_finite(const std::byte* numbers, int64_t count, torch::Dtype dtype) {
  switch (dtype) {
    case torch::kBFloat16:
      return all_finite<uint16_t>(numbers, count, 0x7f80);
    case torch::kFloat16:
      return all_finite<uint16_t>(numbers, count, 0x7c00);
    case torch::kFloat32:
      return all_finite<uint32_t>(numbers, count, 0x7f800000);
    case torch::kFloat8_e4m3fn:
      return all_finite<uint8_t>(numbers, count, 0x7f);
    default:
      throw Error(
          {.what = "numbers of a type that weights do not have", .found = c10::toString(dtype)});
  }
}

}  // namespace

bool copy_numbers(const ByteReader& read, const torch::Tensor& place) {
  const torch::Tensor target = place.view({-1}).view(torch::kUInt8);
  auto staging = place.is_cuda() ? staging_pool().take() : nullptr;
  bool finite = true;
  for (int64_t first = 0; first < target.numel(); first += kPieceBytes) {
    const int64_t bytes = std::min(kPieceBytes, target.numel() - first);
    const torch::Tensor part = target.narrow(0, first, bytes);
    const torch::Tensor piece = staging ? staging->next(bytes) : part;
    auto* const numbers = static_cast<std::byte*>(piece.data_ptr());
    read(static_cast<size_t>(first), static_cast<size_t>(bytes), numbers);
    finite = all_finite(numbers, bytes / place.element_size(), place.scalar_type()) && finite;
    if (staging) staging->send(part);
  }
  if (staging) staging_pool().give_back(std::move(staging));
  return finite;
}

// From bytes of files to tensors of the compute dtype.

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
// what is near zero in the file loses its last bits where an offset is added; decays are powers.
torch::Dtype dtype_on_device(const WeightSpec& spec, torch::Dtype dtype) {
  using enum WeightRole;
  const bool router = spec.role == kRouter || spec.role == kRouterChoiceBias;
  const bool decay = spec.role == kDeltaLogRate || spec.role == kDeltaStepBias;
  return router || decay || spec.offset != 0 ? torch::kFloat32 : dtype;
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
constexpr size_t kReadBytes = size_t{8} << 20;

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
    const auto pieces = static_cast<int64_t>(place.nbytes() / kReadBytes) + 1;
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
    constexpr size_t kAhead = kAheadBytes / kReadBytes;
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

namespace {

torch::Tensor in_order(const torch::Tensor& rows, const std::vector<int64_t>& order) {
  return rows.index_select(0, torch::tensor(order, torch::kInt64).to(rows.device()));
}

// The gate's rows behind those of q, k and v: q_proj has them head by head.
void set_gate_apart(const ModelConfig& config, LayerWeights& layer) {
  const int64_t d = config.head_dim, queries = config.num_qo_heads * d;
  const int64_t others = layer.qkv.size(0) - 2 * queries;
  std::vector<int64_t> order, gate;
  for (int64_t row = 0; row < 2 * queries; ++row) (row / d % 2 == 0 ? order : gate).push_back(row);
  for (int64_t row = 0; row < others; ++row) order.push_back(2 * queries + row);
  layer.o_gate = in_order(layer.qkv, gate);
  layer.qkv = in_order(layer.qkv, order);
}

}  // namespace

LayerWeights load_layer_weights(const WeightSource& weights, const std::vector<WeightSpec>& specs,
                                const ModelConfig& config, int index,
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
  layer.shared_gate = stack({kSharedGate});
  DeltaNetWeights& delta_net = layer.delta_net;
  delta_net.in = stack(
      {kDeltaChannels, kDeltaZ, kDeltaBeta, kDeltaDecay, kDeltaChannelsByHead, kDeltaSharesByHead});
  delta_net.conv = stack({kDeltaConvolution});
  delta_net.log_rate = stack({kDeltaLogRate});
  delta_net.dt_bias = stack({kDeltaStepBias});
  delta_net.norm = stack({kDeltaNorm});
  delta_net.out = stack({kDeltaOut});
  readings.read();
  const LayerSpec& spec = config.layer(index);
  if (spec.attention.gated) set_gate_apart(config, layer);
  if (spec.delta_net) {
    delta_net.conv = delta_net.conv.squeeze(1);
    if (spec.delta_net->rows_by_head) {
      delta_net.in = in_order(delta_net.in, delta_row_order(*spec.delta_net));
    }
  }
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
