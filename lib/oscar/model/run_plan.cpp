// What a run keeps in memory, and what it runs together.
#include "oscar/model/run_plan.h"

#include <ATen/DeviceAccelerator.h>
#include <fmt/format.h>
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <numeric>
#include <string>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/model/device.h"

namespace oscar {

// Batches from chunks, waves from memory.

namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
// libtorch, its libraries and their threads, with no tensor of ours: measured 0.15 GiB after
// a run of next to no tensors on two cores, and half as much again planned, with 24 MiB for what
// malloc keeps: a run took 580 MiB 45 times, then 589 and 604. 0.5 GiB with the half that drives a
// GPU.
int64_t runtime_bytes(torch::Device device) { return int64_t{device.is_cuda() ? 512 : 240} << 20; }

// Activations of one layer while a batch runs, at the worst of three moments: attention (hidden
// states and their norm, q, k, v before and after RoPE, keys and values repeated for every query
// head, the output), an observer (the output, rows joined by head, the float64 copy of one head's
// rows; the kernel that bf16 rows go through on a GPU needs less; and what observing takes beside
// that), and the gated MLP (its two halves, their gate and their product beside hidden states and
// their norm; of experts, once for each that a token passes through, with its rows or its output
// beside the halves, or two outputs).
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

int64_t workspace_bytes(const ModelConfig& config, int64_t batch_tokens, int64_t element_bytes,
                        int64_t observing = 0) {
  const int64_t hidden = config.hidden_size, d = config.head_dim;
  const int64_t q = config.num_qo_heads * d, kv = config.num_kv_heads * d;
  const int64_t rows = 2 * q + 3 * kv;  // q and k twice
  const int64_t attention = element_bytes * (2 * hidden + rows + 3 * q);
  const int64_t observer = element_bytes * (2 * hidden + rows + 2 * q) +
                           8 * (config.num_qo_heads / config.num_kv_heads) * d;
  int64_t elements = 0;
  for (const LayerSpec& layer : config.layers) {
    elements = std::max(elements, mlp_elements(layer, hidden));
  }
  const int64_t mlp = element_bytes * (4 * hidden + elements);
  // Norms whose weights stay in float32 read and write rows of it.
  const bool wide = config.norm_offset != 0 && element_bytes < 4;
  const int64_t norm = wide ? 2 * 4 * std::max(hidden, q) : 0;
  return std::max(batch_tokens * std::max(attention, mlp), batch_tokens * observer + observing) +
         batch_tokens * norm;
}

// One fp64 matrix of every KV head of a layer, and of all layers with statistics.
int64_t layer_matrix_bytes(const ModelConfig& config) {
  return int64_t{config.num_kv_heads} * config.head_dim * config.head_dim * 8;
}

int64_t matrix_bytes(const ModelConfig& config) {
  return config.num_fitted_layers() * layer_matrix_bytes(config);
}

// Running sums of all layers, on the side that computes: q, k, v and the attention output, and q, k
// and v once more where they are weighted by attention.
int64_t running_sums_bytes(const ModelConfig& config, bool attended) {
  return (attended ? 7 : 4) * matrix_bytes(config);
}

// What collecting the weighted ones takes while a batch runs: keys in float32; blocks of scores, as
// they are, as weights, squared and masked; blocks of rows before RoPE with what that takes, then
// in float64 with and without their weights.
int64_t attended_workspace_bytes(const ModelConfig& config, int64_t batch_tokens,
                                 torch::Device device) {
  const int64_t kv = int64_t{config.num_kv_heads} * config.head_dim;
  const int64_t scores =
      std::min(attended_scores(device), config.num_qo_heads * batch_tokens * batch_tokens);
  return 4 * kv * batch_tokens + 4 * 4 * scores +
         (5 * 4 + 2 * 8) * kv * std::min(batch_tokens, attended_rows(device));
}

// Host memory while a checkpoint is written: the sums once more, with the output projection's
// metric, as statistics and as the bytes of the file, `snapshots` copies of sums as bytes, matrices
// of all heads as they will be in the file, packed and before that, and what the file's library
// holds.
int64_t record_bytes(const ModelConfig& config, size_t snapshots, bool attended) {
  constexpr int64_t kLibraryBytes = int64_t{32} << 20;
  return 2 * (running_sums_bytes(config, attended) + matrix_bytes(config)) +
         snapshot_bytes(config, snapshots, attended) +
         2 * datasets_together() * layer_matrix_bytes(config) + kLibraryBytes;
}

constexpr const char* kSmallerBatches =
    "raise the limit, or run fewer tokens together: --batch-tokens, and a --chunk-len no longer "
    "than that";

constexpr const char* kWithoutSearch = "raise the limit, or leave the search out: --search off";

int64_t longest_batch(const std::vector<Batch>& batches) {
  int64_t tokens = 0;
  for (const Batch& batch : batches) tokens = std::max(tokens, batch.tokens());
  return tokens;
}

int64_t largest_wave(const std::vector<Wave>& waves) {
  int64_t tokens = 0;
  for (const Wave& wave : waves) tokens = std::max(tokens, wave.tokens);
  return tokens;
}

constexpr int64_t kMostBlocks = 8;

// Tokens up to the ends of batches, but that of the last, nearest to so many parts of kMostBlocks.
std::vector<int64_t> ends_nearest(const std::vector<Batch>& batches,
                                  const std::vector<int64_t>& parts) {
  std::vector<int64_t> ends;
  for (const Batch& batch : batches) {
    ends.push_back((ends.empty() ? 0 : ends.back()) + batch.tokens());
  }
  std::vector<int64_t> marks;
  if (ends.size() < 2) return marks;
  const int64_t total = ends.back();
  ends.pop_back();
  for (const int64_t part : parts) {
    const int64_t wanted = total * part / kMostBlocks;
    const int64_t mark = *std::min_element(ends.begin(), ends.end(), [&](int64_t a, int64_t b) {
      return std::abs(a - wanted) < std::abs(b - wanted);
    });
    if (marks.empty() || marks.back() != mark) marks.push_back(mark);
  }
  return marks;
}

}  // namespace

std::vector<Batch> plan_batches(const std::vector<std::vector<int32_t>>& chunks,
                                int64_t batch_tokens) {
  std::vector<Batch> batches;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const auto length = static_cast<int64_t>(chunks[i].size());
    const bool fits = !batches.empty() && batches.back().length == length &&
                      batches.back().tokens() + length <= batch_tokens;
    if (fits) {
      ++batches.back().num_chunks;
    } else {
      batches.push_back({static_cast<int64_t>(i), 1, length});
    }
  }
  return batches;
}

std::vector<int64_t> plan_blocks(const std::vector<Batch>& batches) {
  if (batches.empty()) return {};
  std::vector<int64_t> eighths(kMostBlocks - 1);
  std::iota(eighths.begin(), eighths.end(), 1);
  std::vector<int64_t> blocks = ends_nearest(batches, eighths);
  blocks.push_back(std::transform_reduce(batches.begin(), batches.end(), int64_t{0}, std::plus<>(),
                                         [](const Batch& batch) { return batch.tokens(); }));
  return blocks;
}

int64_t block_start(const RunPlan& plan, int64_t tokens) {
  const auto after = std::upper_bound(plan.block_tokens.begin(), plan.block_tokens.end(), tokens);
  return after == plan.block_tokens.begin() ? 0 : *std::prev(after);
}

std::vector<int64_t> plan_snapshots(const std::vector<Batch>& batches) {
  return ends_nearest(batches, {kMostBlocks / 4, kMostBlocks / 2});
}

void refuse_memory(const std::string& what, const char* option, int64_t needed, int64_t limit,
                   const std::string& hint) {
  throw Error({.what = "not enough memory for " + what,
               .where = option,
               .expected = fmt::format("at least {:.2f} GiB", static_cast<double>(needed) / kGiB),
               .found = fmt::format("{:.2f} GiB", static_cast<double>(limit) / kGiB),
               .hint = hint});
}

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

int64_t forward_bytes(const Transformer& model, int64_t batch_tokens) {
  const ModelConfig& config = model.config();
  const auto element = static_cast<int64_t>(torch::elementSize(model.compute().dtype));
  const torch::Device device = model.compute().device;
  return (device.is_cuda() ? 0 : runtime_bytes(device)) +
         int64_t{config.vocab_size} * config.hidden_size * element +
         workspace_bytes(config, batch_tokens, element);
}

int64_t attended_scores(torch::Device device) { return int64_t{1} << (device.is_cuda() ? 25 : 21); }

int64_t attended_rows(torch::Device device) { return device.is_cuda() ? 16384 : 2048; }

int64_t snapshot_bytes(const ModelConfig& config, size_t count, bool attended) {
  // Without the output projection's metric, which is no sum.
  return static_cast<int64_t>(count) * running_sums_bytes(config, attended);
}

int64_t collecting_bytes(const Transformer& model, const std::vector<Batch>& batches,
                         bool attended) {
  const ModelConfig& config = model.config();
  const torch::Device device = model.compute().device;
  const int64_t longest = longest_batch(batches);
  return workspace_bytes(config, longest,
                         static_cast<int64_t>(torch::elementSize(model.compute().dtype)),
                         attended ? attended_workspace_bytes(config, longest, device) : 0);
}

RunPlan plan_run(const Transformer& model, std::vector<Batch> batches, const MemoryLimits& limits,
                 PassNeeds needs) {
  const ModelConfig& config = model.config();
  const bool on_gpu = model.compute().device.is_cuda();
  const auto element = static_cast<int64_t>(torch::elementSize(model.compute().dtype));
  RunPlan plan;
  plan.batches = std::move(batches);
  plan.hidden_bytes_per_token = config.hidden_size * element;
  const int64_t largest_layer = largest_layer_bytes(model);
  const int64_t one_batch_hidden = longest_batch(plan.batches) * plan.hidden_bytes_per_token;
  plan.block_tokens = plan_blocks(plan.batches);
  // Sums of the blocks before lie beside those of the block, and are copied when they are saved;
  // shared, beside those of the next block too, with a copy of both on the host and one of the
  // block of each other process.
  const bool shared = needs.processes > 1, attended = needs.attended;
  const bool searched = needs.search_bytes.has_value();
  const size_t copies = needs.snapshot_tokens.size();
  const int64_t running_sums = (shared ? 3 : 2) * running_sums_bytes(config, attended);
  const size_t more = shared ? static_cast<size_t>(needs.processes) + 1 : 0;
  const int64_t host_sums =
      snapshot_bytes(config, copies + more, attended) + (shared ? 2 * matrix_bytes(config) : 0);
  const auto together = [shared](int64_t a, int64_t b) { return shared ? a + b : std::max(a, b); };
  const bool checkpoints = needs.checkpoint_every != kNoCheckpoints;
  const int64_t record =
      checkpoints || needs.saved_beside
          ? record_bytes(config, copies + 1, attended) + snapshot_bytes(config, 1, attended)
          : 0;
  const int64_t workspace = collecting_bytes(model, plan.batches, attended);
  const int64_t host_fixed =
      runtime_bytes(model.compute().device) + host_sums + together(record, 2 * largest_layer);
  plan.snapshot_tokens = std::move(needs.snapshot_tokens);
  plan.attended = attended;
  plan.workspace_bytes = workspace;

  // Memory of the side that computes, and of the host that feeds it.
  const int64_t compute_limit = limits.of_compute(model.compute().device);
  int64_t fixed = forward_bytes(model, 0) + running_sums;
  if (on_gpu) {
    fixed += workspace;
  } else {
    fixed += host_sums + together(workspace, record);
  }
  // The present layer and the next one, of which a part is read before it is in its place.
  const int64_t streamed_layers = 2 * largest_layer + largest_layer / 2;
  int64_t total_tokens = 0;
  for (const Batch& batch : plan.batches) total_tokens += batch.tokens();
  // Between layers, of a search of all batches; those of a GPU may lie on the host while weights
  // stream.
  const int64_t all_hidden = total_tokens * plan.hidden_bytes_per_token;
  const int64_t least_hidden =
      searched ? std::max(all_hidden, 2 * one_batch_hidden) : 2 * one_batch_hidden;
  const int64_t beside = needs.search_bytes.value_or(0);
  const int64_t minimum =
      fixed + streamed_layers + beside + (on_gpu ? 2 * one_batch_hidden : least_hidden);
  if (minimum > compute_limit) {
    refuse_memory(searched ? "the search of one layer" : "one layer and one batch",
                  MemoryLimits::option_of_compute(model.compute().device), minimum, compute_limit,
                  searched ? kWithoutSearch : kSmallerBatches);
  }
  const int64_t all_layers = all_layer_bytes(model);
  plan.weights_resident = fixed + all_layers + beside + least_hidden <= compute_limit;
  fixed += plan.weights_resident ? all_layers : streamed_layers;
  const int64_t room = compute_limit - fixed - beside;
  plan.hidden_on_device = !on_gpu || room >= std::min(all_hidden, room / 2 + 1);
  int64_t hidden_room = room;
  if (on_gpu && !plan.weights_resident && all_hidden > room) {
    // Weights stream: the fewer the waves, the fewer passes of the weights. The host is larger.
    plan.hidden_on_device = false;
    hidden_room = limits.host_bytes - host_fixed;
    const int64_t least = searched ? all_hidden : one_batch_hidden;
    if (hidden_room < least) {
      refuse_memory(searched ? "hidden states of a search" : "hidden states of one batch",
                    "--host-memory", host_fixed + least, limits.host_bytes,
                    searched ? kWithoutSearch : kSmallerBatches);
    }
  }

  // A stop between two layers saves them, from the host.
  const bool hidden_on_host = !plan.hidden_on_device || checkpoints;
  if (on_gpu && hidden_on_host) {
    hidden_room = std::min(hidden_room, std::max(one_batch_hidden, limits.host_bytes - host_fixed));
  }
  plan.hidden_room = hidden_room;

  int64_t wave_chunks = 0;
  for (size_t i = 0; i < plan.batches.size(); ++i) {
    const Batch& batch = plan.batches[i];
    const bool full =
        plan.waves.empty() ||
        (plan.waves.back().tokens + batch.tokens()) * plan.hidden_bytes_per_token > hidden_room ||
        (plan.weights_resident && checkpoints && wave_chunks >= needs.checkpoint_every);
    if (full) {
      plan.waves.push_back({i, 0, 0});
      wave_chunks = 0;
    }
    ++plan.waves.back().num_batches;
    plan.waves.back().tokens += batch.tokens();
    wave_chunks += batch.num_chunks;
  }
  const int64_t hidden = largest_wave(plan.waves) * plan.hidden_bytes_per_token;
  if (on_gpu) {
    plan.peak_device_bytes = fixed + (plan.hidden_on_device ? hidden : 2 * one_batch_hidden);
    plan.peak_host_bytes = host_fixed + (hidden_on_host ? hidden : 0);
  } else {
    plan.peak_host_bytes = fixed + hidden;
  }
  return plan;
}

RunPlan in_one_wave(RunPlan plan, const torch::Device& device) {
  const int64_t tokens = tokens_of(plan, 0, plan.batches.size());
  const bool on_gpu = device.is_cuda() && plan.hidden_on_device;
  // Hidden states of the largest wave are in the peak already.
  (on_gpu ? plan.peak_device_bytes : plan.peak_host_bytes) +=
      (tokens - largest_wave(plan.waves)) * plan.hidden_bytes_per_token;
  plan.waves = {{0, plan.batches.size(), tokens}};
  return plan;
}

int64_t tokens_of(const RunPlan& plan, size_t first, size_t count) {
  int64_t tokens = 0;
  for (size_t i = first; i < first + count; ++i) tokens += plan.batches[i].tokens();
  return tokens;
}

std::vector<Wave> waves_from(const RunPlan& plan, size_t batch, size_t num_started) {
  std::vector<Wave> waves;
  if (num_started > 0) waves.push_back({batch, num_started, tokens_of(plan, batch, num_started)});
  const size_t next = batch + num_started;
  for (const Wave& wave : plan.waves) {
    const size_t first = std::max(wave.first_batch, next);
    const size_t end = wave.first_batch + wave.num_batches;
    if (first < end) waves.push_back({first, end - first, tokens_of(plan, first, end - first)});
  }
  return waves;
}

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

}  // namespace oscar
