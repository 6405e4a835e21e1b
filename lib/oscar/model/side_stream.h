// Streams of a GPU for work beside that of the default one.
#pragma once

#include <c10/core/Stream.h>

#include "oscar/model/torch.h"

namespace oscar {

// Stream `number` of kSideStreams, of the first device that asks: a process computes on one. It is
// the same for the life of the process, since memory that a stream's tensors have given back serves
// that stream alone. Its users come one after another.
enum SideStream : int {
  kLoadingStreams = 0,
  kSumsStream = 3,
  kSearchStreams = 4,
  kSideStreams = 8
};
c10::Stream side_stream(torch::Device device, int number);

// Until all that was begun on the present stream of the GPU `device` has ended.
void wait_for_stream(torch::Device device);

}  // namespace oscar
