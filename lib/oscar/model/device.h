// Memory and streams of a device.
#pragma once

#include <c10/core/StreamGuard.h>
#include <cstdint>
#include <optional>

#include "oscar/model/layer_weights.h"
#include "oscar/model/torch.h"

namespace oscar {

// What libtorch may take of a GPU's memory.

// From now on libtorch takes `bytes` of this GPU at most: it keeps freed memory for each stream
// apart, up to twice of what a run needs, and gives that back to others before it fails. CUDA's own
// context and kernels, some 0.7 GiB, come on top. Nothing on a CPU, and in builds without kernels.
void limit_device_memory(const torch::Device& device, int64_t bytes);

// Memory of the host that a GPU reads and writes by itself.

// `tensor`, contiguous and on the CPU, whose memory is page-locked for as long as what is returned
// lives. Copies between it and `device` then take the whole bus, and with non_blocking no time of
// the calling thread: others pass through buffers of the driver's (a calibration that took 85 s
// with them takes 18). Returned as it is for a CPU, in builds without CUDA, and where the system
// locks no more: copies are right then too.
torch::Tensor pinned(torch::Tensor tensor, const torch::Device& device);

// Streams of a GPU for work beside that of the default one.

// Stream `number` of kSideStreams, of the first device that asks: a process computes on one. It is
// the same for the life of the process, since memory that a stream's tensors have given back serves
// that stream alone. What its users begin runs one after another.
enum SideStream : int { kLoadingStream = 0, kSumsStream = 1, kSearchStreams = 2, kSideStreams = 6 };
c10::Stream side_stream(torch::Device device, int number);

// Until all that was begun on the present stream of the GPU `device` has ended.
void wait_for_stream(torch::Device device);

// This thread's on `device`; none on a CPU.
std::optional<c10::Stream> present_stream(torch::Device device);

// Inference in another thread, on `stream` where there is one.
class InferenceOn {
 public:
  explicit InferenceOn(const std::optional<c10::Stream>& stream) {
    if (stream) guard_.emplace(*stream);
  }

 private:
  const torch::InferenceMode inference_;
  std::optional<c10::StreamGuard> guard_;
};

}  // namespace oscar
