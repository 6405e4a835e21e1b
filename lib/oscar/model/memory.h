// Memory of a run: what its parts need, what there is, and what is made of both.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oscar/model/transformer.h"

namespace oscar {

// What there is.

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

// Memory that is free now: MemAvailable of the host, or less where a container has a limit, and
// free bytes of the device.
MemoryLimits free_memory(const torch::Device& device);

// What --host-memory and --gpu-memory allow, in bytes; 0: what is free now.
MemoryLimits memory_limits(const torch::Device& device, int64_t host_memory, int64_t gpu_memory);

// Where --gpu-memory was given, libtorch is held to it from now on (model/device.h): once
// what runs has been found to fit, so that what does not fit is told in numbers.
void hold_device_memory(const MemoryLimits& limits, const torch::Device& device);

// What is needed: each part of a run states its own by one function, and knows no other's.

// When a need is there. Of the last three only one is there at a time.
enum class Moment {
  kAlways,
  kPassing,  // while a batch passes a layer
  kBetween,  // once all batches have passed a layer; on a GPU while they pass the next ones
  kSaving,   // while a checkpoint is written
};

struct MemoryNeed {
  std::string name = {};  // as errors and --dry-run say it
  Moment moment = Moment::kAlways;
  int64_t compute_bytes = 0;  // on the side that computes: the GPU, or the host where there is none
  int64_t host_bytes = 0;     // on the host in any case
};

struct MemoryNeeds {
  std::vector<MemoryNeed> held = {};
  // Weights of layers on the side that computes: of those that are there while they stream, and of
  // all.
  int64_t streamed_layers = 0, all_layers = 0;
  // Hidden states between layers: bytes of a token; tokens of the largest batch, and of all.
  int64_t hidden_of_token = 0, batch_tokens = 0, all_tokens = 0;
  bool hidden_at_once = false;   // all batches pass a layer before the next one
  bool hidden_saved = false;     // a stop between two layers saves them, from the host
  bool saved_meanwhile = false;  // needs of kSaving are there beside those of kPassing
  int most_side_by_side = 1;     // times that the needs of kBetween may be there, on a GPU
  // What an error names where the least does not fit, and what else than a larger limit would help.
  std::string least = "one layer and one batch", hint = {};
};

// The forward pass over batches of at most `batch_tokens`: libtorch, the embedding, activations,
// weights and hidden states. An observer takes `observing_bytes` while it sees a batch.
MemoryNeeds model_needs(const Transformer& model, int64_t batch_tokens,
                        int64_t observing_bytes = 0);

// Bytes of the largest layer's weights, and of all.
int64_t largest_layer_bytes(const Transformer& model);
int64_t all_layer_bytes(const Transformer& model);

// What is made of both.

struct MemoryPlan {
  bool weights_resident = false;  // all layers stay on the device; otherwise they stream
  bool hidden_on_device = true;   // hidden states between layers: on the device, or on the host
  int64_t hidden_room = 0;        // bytes that they may take there
  int side_by_side = 1;           // times that the needs of kBetween are there
};

// Throws Error with the bytes needed, the largest part of them and the option that allows too
// little, when even the least does not fit.
MemoryPlan plan_memory(const MemoryNeeds& needs, const MemoryLimits& limits,
                       const torch::Device& device);

// The same where weights stay as `streamed_layers` says, and any number of batches may pass
// together: half of what is left for hidden states, so that what is not counted has a place; all of
// it where one batch needs more than half.
int64_t plan_hidden_room(const MemoryNeeds& needs, const MemoryLimits& limits,
                         const torch::Device& device);

// Estimates for --dry-run.
struct MemoryPeak {
  int64_t host_bytes = 0, device_bytes = 0;
  // On the side that computes.
  std::string largest = {};  // name of a need
  int64_t largest_bytes = 0;
};

// With hidden states of `tokens` together.
MemoryPeak memory_peak(const MemoryNeeds& needs, const MemoryPlan& plan, int64_t tokens,
                       const torch::Device& device);

// Of two parts of a run, one after the other on `device`.
MemoryPeak larger_peak(const MemoryPeak& a, const MemoryPeak& b, const torch::Device& device);

}  // namespace oscar
