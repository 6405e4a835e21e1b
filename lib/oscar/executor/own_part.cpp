// GPUs by local rank, memory and cores by equal parts.
#include "oscar/executor/own_part.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>

#include "oscar/base/parallel.h"

namespace oscar {

ComputeOptions own_compute(const Ranks& ranks, const std::string& device, const std::string& dtype,
                           Progress& progress) {
  const ComputeOptions compute = choose_compute(device, dtype);
  if (ranks.several() && device == "auto" && !compute.device.is_cuda()) {
    progress.note(fmt::format("no GPU was found: {} processes share the CPU", ranks.size()));
  }
  const bool any_gpu = compute.device.is_cuda() && device.find(':') == std::string::npos;
  if (!ranks.several() || !any_gpu) return compute;
  return choose_compute(fmt::format("cuda:{}", ranks.local_rank()), dtype);
}

MemoryLimits own_memory(const Ranks& ranks, const torch::Device& device, int64_t host_memory,
                        int64_t gpu_memory) {
  MemoryLimits limits = memory_limits(device, host_memory, gpu_memory);
  if (host_memory == 0) limits.host_bytes /= ranks.local_size();
  return limits;
}

double longest_part(const Ranks& ranks, const torch::Device& device, size_t pieces) {
  if (pieces == 0) return 0;
  const auto processes = static_cast<size_t>(ranks.size());
  const double largest = static_cast<double>((pieces + processes - 1) / processes);
  int64_t on_machine = ranks.local_size();
  if (!device.is_cuda()) {
    on_machine = std::clamp<int64_t>(parallel_cores() / at::get_num_threads(), 1, on_machine);
  }
  const double turns = static_cast<double>(ranks.local_size()) / static_cast<double>(on_machine);
  return std::min(1.0, largest * turns / static_cast<double>(pieces));
}

}  // namespace oscar
