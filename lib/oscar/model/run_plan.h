// What a run keeps in memory, and what it runs together.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "oscar/model/transformer.h"
#include "oscar/text/corpus.h"

namespace oscar {

// Which chunks run together, what stays in memory, and how the corpus splits into waves.

// Consecutive chunks of one length that run as one tensor. Depends on the chunks and on
// batch_tokens only, never on memory: sums are the same on every machine of a kind.
struct Batch {
  int64_t first_chunk = 0;
  int64_t num_chunks = 0;
  int64_t length = 0;  // tokens of each chunk
  int64_t tokens() const { return num_chunks * length; }
};

// A run of batches whose hidden states are kept together; weights pass once per wave.
struct Wave {
  size_t first_batch = 0, num_batches = 0;
  int64_t tokens = 0;
};

struct MemoryLimits {
  int64_t host_bytes = 0;       // for this process
  int64_t device_bytes = 0;     // of the GPU; unused on the CPU
  bool device_limited = false;  // device_bytes is what --gpu-memory says

  // Of the side that computes, and the option that sets it.
  int64_t of_compute(const torch::Device& device) const {
    return device.is_cuda() ? device_bytes : host_bytes;
  }
  static const char* option_of_compute(const torch::Device& device) {
    return device.is_cuda() ? "--gpu-memory" : "--host-memory";
  }
};

struct RunPlan {
  std::vector<Batch> batches;
  std::vector<Wave> waves;
  // Tokens at the ends of the blocks whose sums are added up one after another; the last is of all.
  std::vector<int64_t> block_tokens;
  // Tokens, at ends of batches, at which each layer's sums are copied
  // (calibrate/assemble.h).
  std::vector<int64_t> snapshot_tokens;
  bool attended = false;          // sums weighted by attention are collected too
  bool weights_resident = false;  // all layers stay on the device; otherwise they stream
  bool hidden_on_device = true;   // hidden states between layers: on the device, or on the host
  int64_t hidden_bytes_per_token = 0;
  int64_t hidden_room = 0;      // bytes that hidden states between layers may take
  int64_t workspace_bytes = 0;  // of a batch in one layer, on the side that computes
  int64_t peak_host_bytes = 0, peak_device_bytes = 0;  // estimates for --dry-run
};

std::vector<Batch> plan_batches(const std::vector<std::vector<int32_t>>& chunks,
                                int64_t batch_tokens);

// Tokens up to the ends of batches that are nearest to each eighth of all, ascending and without
// repetition; the last is of all. Depends on the batches only: sums are of a block, and blocks are
// added in order, so that no figure depends on how many processes share them.
std::vector<int64_t> plan_blocks(const std::vector<Batch>& batches);

// Of plan.block_tokens, the last that is at most `tokens`; 0 where there is none.
int64_t block_start(const RunPlan& plan, int64_t tokens);

// Tokens up to the ends of batches that are nearest to a quarter and to half of all, ascending and
// without repetition; the end of the last batch is none of them. Empty for a single batch.
std::vector<int64_t> plan_snapshots(const std::vector<Batch>& batches);

// Attention scores that a collector of sums weighted by attention holds at a time, with a few
// tensors as large: few enough for a processor's cache, or enough to keep a GPU busy.
int64_t attended_scores(torch::Device device);
// Rows, of each head, that it converts to float64 at a time.
int64_t attended_rows(torch::Device device);

// What `count` copies of all layers' sums take in host memory and in a checkpoint.
int64_t snapshot_bytes(const ModelConfig& config, size_t count, bool attended);

// What a pass over a corpus holds and writes beside weights, activations and hidden states.
inline constexpr int kNoCheckpoints = 0;
struct PassNeeds {
  // So many chunks bound a wave while weights are resident (a wave then costs nothing);
  // kNoCheckpoints: none is written, so that no memory is needed for one.
  int checkpoint_every = kNoCheckpoints;
  bool saved_beside = false;             // sums of a pass before are saved while this one goes on
  std::vector<int64_t> snapshot_tokens;  // as of plan_snapshots
  bool attended = false;                 // sums weighted by attention are collected too
  // Of several, sums of a block are added and saved while the next one passes, and those of others
  // wait in the first.
  int processes = 1;
  // Of a search: what it takes on the side that computes, beside hidden states of all batches
  // (in_one_wave); not in the peaks.
  std::optional<int64_t> search_bytes;
};

// Throws Error with the bytes needed when even one batch and one layer do not fit.
RunPlan plan_run(const Transformer& model, std::vector<Batch> batches, const MemoryLimits& limits,
                 PassNeeds needs);

// `plan`, made for `device`, with all its batches in one wave whatever room there is, and with the
// peaks of that: a search sees all held-back chunks of a layer at once.
RunPlan in_one_wave(RunPlan plan, const torch::Device& device);

// What is left of the plan's waves at `batch`, for a run that continues there. Another plan may
// have got it there: a wave of this one is cut at `batch`, and the `num_started` batches from
// there on, which were between two layers, come first as the wave that they were.
std::vector<Wave> waves_from(const RunPlan& plan, size_t batch, size_t num_started);

// Tokens of `count` batches from `first` on.
int64_t tokens_of(const RunPlan& plan, size_t first, size_t count);

// Memory that is free now: MemAvailable of the host, or less where a container has a limit, and
// free bytes of the device.
MemoryLimits free_memory(const torch::Device& device);

// What --host-memory and --gpu-memory allow, in bytes; 0: what is free now.
MemoryLimits memory_limits(const torch::Device& device, int64_t host_memory, int64_t gpu_memory);

// Where --gpu-memory was given, libtorch is held to it from now on (model/device.h): once
// what runs has been found to fit, so that what does not fit is told in numbers.
void hold_device_memory(const MemoryLimits& limits, const torch::Device& device);

// Bytes of the side that computes while batches of at most `batch_tokens` pass layer after layer,
// without layer weights, hidden states between layers and what an observer keeps: libtorch itself
// where that is the host, the embedding, activations of a layer.
int64_t forward_bytes(const Transformer& model, int64_t batch_tokens);

// What the longest batch takes in one layer on that side, an observer of its rows included.
int64_t collecting_bytes(const Transformer& model, const std::vector<Batch>& batches,
                         bool attended);

// Bytes of the largest layer's weights, and of all.
int64_t largest_layer_bytes(const Transformer& model);
int64_t all_layer_bytes(const Transformer& model);

// Throws Error: `option` allows `limit` bytes and `what` needs more. `hint`: what else would help.
[[noreturn]] void refuse_memory(const std::string& what, const char* option, int64_t needed,
                                int64_t limit, const std::string& hint);

}  // namespace oscar
