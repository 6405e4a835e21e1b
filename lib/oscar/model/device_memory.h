// What libtorch may take of a GPU's memory.
#pragma once

#include <cstdint>

#include "oscar/model/compute.h"

namespace oscar {

// From now on libtorch takes `bytes` of this GPU at most: it keeps freed memory for each stream
// apart, up to twice of what a run needs, and gives that back to others before it fails. CUDA's own
// context and kernels, some 0.7 GiB, come on top. Nothing on a CPU, and in builds without kernels.
void limit_device_memory(const torch::Device& device, int64_t bytes);

}  // namespace oscar
