// Memory of a run: what its parts need, what there is, and what is made of both.
#include "oscar/model/memory.h"

#include <ATen/DeviceAccelerator.h>
#include <fmt/format.h>
#include <unistd.h>
#include <algorithm>
#include <fstream>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/model/device.h"

namespace oscar {

// Limits by option, control group and what is free.

MemoryLimits memory_limits(const torch::Device& device, int64_t host_memory, int64_t gpu_memory) {
  MemoryLimits limits = free_memory(device);
  if (host_memory > 0) limits.host_bytes = host_memory;
  if (gpu_memory > 0) limits.device_bytes = gpu_memory;
  limits.device_limited = gpu_memory > 0;
  return limits;
}

void hold_device_memory(const MemoryLimits& limits, const torch::Device& device) {
  if (limits.device_limited) limit_device_memory(device, limits.device_bytes);
}

MemoryLimits free_memory(const torch::Device& device) {
  MemoryLimits limits;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, unit; meminfo >> key;) {
    int64_t kibibytes = 0;
    meminfo >> kibibytes >> unit;
    if (key == "MemAvailable:") limits.host_bytes = kibibytes * 1024;
  }
  if (limits.host_bytes == 0) {
    limits.host_bytes = ::sysconf(_SC_AVPHYS_PAGES) * ::sysconf(_SC_PAGESIZE);
  }
  limits.host_bytes = std::min(limits.host_bytes, control_group_memory());
  if (device.is_cuda()) {
    limits.device_bytes =
        static_cast<int64_t>(at::accelerator::getMemoryInfo(device.index()).first);
  }
  return limits;
}

// What the forward pass needs.

namespace {

// libtorch, its libraries and their threads, with no tensor of ours: measured 0.15 GiB after
// a run of next to no tensors on two cores, and half as much again planned, with 24 MiB for what
// malloc keeps: a run took 580 MiB 45 times, then 589 and 604. 0.5 GiB with the half that drives a
// GPU.
int64_t runtime_bytes(torch::Device device) { return int64_t{device.is_cuda() ? 512 : 240} << 20; }

// Activations of one layer while a batch runs, at the worst of four moments: attention (hidden
// states and their norm, q, k, v before and after RoPE, keys and values repeated for every query
// head, the output), an observer (the output, rows joined by head, the float64 copy of one head's
// rows; the kernel that bf16 rows go through on a GPU needs less; and what observing takes beside
// that), a linear layer, and the gated MLP (its two halves, their gate and their product beside
// hidden states and their norm; of experts, once for each that a token passes through, with its
// rows or its output beside the halves, or two outputs).
int64_t mlp_elements(const LayerSpec& layer, int64_t hidden) {
  const int64_t dense = 4 * int64_t{layer.dense_intermediate_size()};
  const ExpertsSpec* experts = layer.experts();
  if (experts == nullptr) return dense;
  const int64_t width = experts->intermediate_size;
  const int64_t of_expert = std::max({hidden + 2 * width, 4 * width, 2 * hidden});
  // Rows and scores of the router are float32.
  return std::max(dense, hidden + experts->top_k * of_expert) +
         2 * (hidden + 4 * int64_t{experts->num_experts});
}

int64_t activation_bytes(const ModelConfig& config, int64_t batch_tokens, int64_t element_bytes,
                         int64_t observing, bool on_gpu) {
  const int64_t hidden = config.hidden_size, d = config.head_dim;
  const int64_t q = config.num_qo_heads * d, kv = config.num_kv_heads * d;
  const int64_t gate = config.has_output_gates() ? 2 * q : 0;  // and outputs that it multiplied
  const int64_t rows = 2 * q + 3 * kv + gate;                  // q and k twice
  const int64_t attention = element_bytes * (2 * hidden + rows + 3 * q);
  const int64_t observer = element_bytes * (2 * hidden + rows + 2 * q) +
                           8 * (config.num_qo_heads / config.num_kv_heads) * d;
  int64_t elements = 0;
  int64_t delta_net = 0;
  for (const LayerSpec& layer : config.layers) {
    elements = std::max(elements, mlp_elements(layer, hidden));
    if (!layer.delta_net) continue;
    delta_net =
        std::max(delta_net, delta_net_bytes(*layer.delta_net, batch_tokens, element_bytes, on_gpu));
  }
  const int64_t linear = delta_net + batch_tokens * element_bytes * 2 * hidden;
  const int64_t mlp = element_bytes * (4 * hidden + elements);
  // Norms whose weights stay in float32 read and write rows of it.
  const bool wide = config.norm_offset != 0 && element_bytes < 4;
  const int64_t norm = wide ? 2 * 4 * std::max(hidden, q) : 0;
  const int64_t attending =
      std::max(batch_tokens * std::max(attention, mlp), batch_tokens * observer + observing);
  return std::max(attending, linear) + batch_tokens * norm;
}

}  // namespace

int64_t largest_layer_bytes(const Transformer& model) {
  size_t largest = 0;
  for (int layer = 0; layer < model.config().num_layers; ++layer) {
    largest = std::max(largest, model.layer_bytes(layer));
  }
  return static_cast<int64_t>(largest);
}

int64_t all_layer_bytes(const Transformer& model) {
  size_t bytes = 0;
  for (int layer = 0; layer < model.config().num_layers; ++layer) bytes += model.layer_bytes(layer);
  return static_cast<int64_t>(bytes);
}

MemoryNeeds model_needs(const Transformer& model, int64_t batch_tokens, int64_t observing_bytes) {
  const ModelConfig& config = model.config();
  const torch::Device device = model.compute().device;
  const auto element = static_cast<int64_t>(torch::elementSize(model.compute().dtype));
  const int64_t layer = largest_layer_bytes(model);
  MemoryNeeds needs;
  needs.held = {{.name = "libtorch", .host_bytes = runtime_bytes(device)},
                {.name = "the embedding",
                 .compute_bytes = int64_t{config.vocab_size} * config.hidden_size * element},
                {.name = "activations of a batch",
                 .moment = Moment::kPassing,
                 .compute_bytes = activation_bytes(config, batch_tokens, element, observing_bytes,
                                                   device.is_cuda())}};
  if (device.is_cuda()) {
    needs.held.push_back({.name = "layers on their way to the GPU",
                          .moment = Moment::kPassing,
                          .host_bytes = 2 * layer});
  }
  // The present layer and the next one, of which a part is read before it is in its place.
  needs.streamed_layers = 2 * layer + layer / 2;
  needs.all_layers = all_layer_bytes(model);
  needs.hidden_of_token = config.hidden_size * element;
  needs.batch_tokens = needs.all_tokens = batch_tokens;
  return needs;
}

// Sums of needs at their worst moment.

namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

// Which bytes of a need count: of the GPU, of the host beside one, or of a host that computes.
enum class Where { kDevice, kBesideDevice, kHost };

int64_t bytes_of(const MemoryNeed& need, Where where) {
  return (where != Where::kBesideDevice ? need.compute_bytes : 0) +
         (where != Where::kDevice ? need.host_bytes : 0);
}

// The needs that are there together when they take most, as {name, bytes}.
using Parts = std::vector<std::pair<std::string, int64_t>>;

int64_t total(const Parts& parts) {
  int64_t bytes = 0;
  for (const auto& [name, part] : parts) bytes += part;
  return bytes;
}

Parts parts_at(const MemoryNeeds& needs, Where where, std::initializer_list<Moment> moments,
               int64_t times = 1) {
  Parts parts;
  for (const MemoryNeed& need : needs.held) {
    if (std::find(moments.begin(), moments.end(), need.moment) == moments.end()) continue;
    parts.emplace_back(need.name, times * bytes_of(need, where));
  }
  return parts;
}

Parts worst_parts(const MemoryNeeds& needs, Where where, int side_by_side) {
  using enum Moment;
  std::vector<Parts> moments;
  if (needs.saved_meanwhile) {
    moments = {parts_at(needs, where, {kPassing, kSaving})};
  } else {
    moments = {parts_at(needs, where, {kPassing}), parts_at(needs, where, {kSaving})};
  }
  const Parts between = parts_at(needs, where, {kBetween}, side_by_side);
  if (where == Where::kHost) moments.push_back(between);
  Parts parts = parts_at(needs, where, {kAlways});
  const Parts& worst =
      *std::max_element(moments.begin(), moments.end(),
                        [](const auto& a, const auto& b) { return total(a) < total(b); });
  parts.insert(parts.end(), worst.begin(), worst.end());
  if (where != Where::kHost) parts.insert(parts.end(), between.begin(), between.end());
  return parts;
}

Where computing(const torch::Device& device) {
  return device.is_cuda() ? Where::kDevice : Where::kHost;
}

// With weights and hidden states of `hidden` bytes.
Parts compute_parts(const MemoryNeeds& needs, int64_t layers, int64_t hidden, int side_by_side,
                    const torch::Device& device) {
  Parts parts = worst_parts(needs, computing(device), side_by_side);
  parts.emplace_back("weights of layers", layers);
  parts.emplace_back("hidden states between layers", hidden);
  return parts;
}

std::pair<std::string, int64_t> largest(const Parts& parts) {
  return *std::max_element(parts.begin(), parts.end(),
                           [](const auto& a, const auto& b) { return a.second < b.second; });
}

// Hidden states that are there at least: what enters a layer, and what leaves it.
int64_t least_hidden(const MemoryNeeds& needs) {
  const int64_t entering_and_leaving = 2 * needs.batch_tokens;
  return needs.hidden_of_token * (needs.hidden_at_once
                                      ? std::max(needs.all_tokens, entering_and_leaving)
                                      : entering_and_leaving);
}

// `option` allows `limit` bytes, and `what` needs `parts`. `hint`: what else would help.
[[noreturn]] void refuse_memory(const std::string& what, const char* option, const Parts& parts,
                                int64_t limit, const std::string& hint) {
  const auto gib = [](int64_t bytes) { return static_cast<double>(bytes) / kGiB; };
  const auto& [name, bytes] = largest(parts);
  throw Error({.what = "not enough memory for " + what,
               .where = option,
               .expected = fmt::format("at least {:.2f} GiB, of which {:.2f} GiB for {}",
                                       gib(total(parts)), gib(bytes), name),
               .found = fmt::format("{:.2f} GiB", gib(limit)),
               .hint = hint});
}

}  // namespace

// Decisions: weights stay if all fits, hidden states lie on the device as far as they do.

MemoryPlan plan_memory(const MemoryNeeds& needs, const MemoryLimits& limits,
                       const torch::Device& device) {
  const bool on_gpu = device.is_cuda();
  const int64_t limit = limits.of_compute(device);
  const int64_t one_batch = needs.batch_tokens * needs.hidden_of_token;
  const int64_t all_hidden = needs.all_tokens * needs.hidden_of_token;
  const int64_t least = least_hidden(needs);
  // Those of a GPU may lie on the host while weights stream.
  const Parts minimum =
      compute_parts(needs, needs.streamed_layers, on_gpu ? 2 * one_batch : least, 1, device);
  if (total(minimum) > limit) {
    refuse_memory(needs.least, MemoryLimits::option_of_compute(device), minimum, limit, needs.hint);
  }
  MemoryPlan plan;
  const int64_t held = total(worst_parts(needs, computing(device), 1));
  plan.weights_resident = held + needs.all_layers + least <= limit;
  const int64_t layers = plan.weights_resident ? needs.all_layers : needs.streamed_layers;
  plan.hidden_room = limit - held - layers;
  if (!on_gpu) return plan;

  Parts host = worst_parts(needs, Where::kBesideDevice, 1);
  const int64_t host_room = limits.host_bytes - total(host);
  if (!plan.weights_resident && all_hidden > plan.hidden_room) {
    // Weights stream: the fewer the waves, the fewer passes of the weights. The host is larger.
    plan.hidden_on_device = false;
    plan.hidden_room = host_room;
    const int64_t wave = needs.hidden_at_once ? all_hidden : one_batch;
    host.emplace_back("hidden states between layers", wave);
    if (host_room < wave) {
      refuse_memory(
          needs.hidden_at_once ? "hidden states of all batches" : "hidden states of one batch",
          "--host-memory", host, limits.host_bytes, needs.hint);
    }
  }
  if (!plan.hidden_on_device || needs.hidden_saved) {
    plan.hidden_room = std::min(plan.hidden_room, std::max(one_batch, host_room));
  }
  const int64_t between = total(parts_at(needs, Where::kDevice, {Moment::kBetween}));
  if (between > 0) {
    const int64_t hidden = plan.hidden_on_device ? all_hidden : 2 * one_batch;
    const int64_t room = limit - (held - between) - layers - hidden;
    plan.side_by_side =
        static_cast<int>(std::clamp<int64_t>(room / between, 1, needs.most_side_by_side));
  }
  return plan;
}

int64_t plan_hidden_room(const MemoryNeeds& needs, const MemoryLimits& limits,
                         const torch::Device& device) {
  const int64_t limit = limits.of_compute(device);
  const int64_t one_batch = needs.batch_tokens * needs.hidden_of_token;
  const Parts minimum = compute_parts(needs, needs.streamed_layers, one_batch, 1, device);
  if (total(minimum) > limit) {
    refuse_memory(needs.least, MemoryLimits::option_of_compute(device), minimum, limit, needs.hint);
  }
  return std::max(one_batch, (limit - (total(minimum) - one_batch)) / 2);
}

MemoryPeak memory_peak(const MemoryNeeds& needs, const MemoryPlan& plan, int64_t tokens,
                       const torch::Device& device) {
  const int64_t hidden = tokens * needs.hidden_of_token;
  const int64_t there =
      plan.hidden_on_device ? hidden : 2 * needs.batch_tokens * needs.hidden_of_token;
  const Parts parts =
      compute_parts(needs, plan.weights_resident ? needs.all_layers : needs.streamed_layers, there,
                    plan.side_by_side, device);
  MemoryPeak peak;
  std::tie(peak.largest, peak.largest_bytes) = largest(parts);
  if (!device.is_cuda()) {
    peak.host_bytes = total(parts);
    return peak;
  }
  const bool hidden_on_host = !plan.hidden_on_device || needs.hidden_saved;
  peak.device_bytes = total(parts);
  peak.host_bytes =
      total(worst_parts(needs, Where::kBesideDevice, 1)) + (hidden_on_host ? hidden : 0);
  return peak;
}

MemoryPeak larger_peak(const MemoryPeak& a, const MemoryPeak& b, const torch::Device& device) {
  const auto computing = [&](const MemoryPeak& peak) {
    return device.is_cuda() ? peak.device_bytes : peak.host_bytes;
  };
  MemoryPeak peak = computing(a) < computing(b) ? b : a;
  peak.host_bytes = std::max(a.host_bytes, b.host_bytes);
  peak.device_bytes = std::max(a.device_bytes, b.device_bytes);
  return peak;
}

}  // namespace oscar
