// Memory of the host that a GPU reads and writes by itself.
#pragma once

#include "oscar/model/torch.h"

namespace oscar {

// `tensor`, contiguous and on the CPU, whose memory is page-locked for as long as what is returned
// lives. Copies between it and `device` then take the whole bus, and with non_blocking no time of
// the calling thread: others pass through buffers of the driver's (a calibration that took 85 s
// with them takes 18). Returned as it is for a CPU, in builds without CUDA, and where the system
// locks no more: copies are right then too.
torch::Tensor pinned(torch::Tensor tensor, const torch::Device& device);

}  // namespace oscar
