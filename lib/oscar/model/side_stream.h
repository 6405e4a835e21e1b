// Streams of a GPU for work beside that of the default one.
#pragma once

#include <c10/core/StreamGuard.h>

#include <optional>

#include "oscar/model/torch.h"

namespace oscar {

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
