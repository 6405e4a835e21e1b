// What each of several processes takes of the machine that they share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "oscar/base/progress.h"
#include "oscar/executor/ranks.h"
#include "oscar/executor/run_plan.h"
#include "oscar/model/compute.h"

namespace oscar {

// choose_compute; of several processes, where it is any GPU, each has its own. `progress` notes
// that there are none where "auto" has found none.
ComputeOptions own_compute(const Ranks& ranks, const std::string& device, const std::string& dtype,
                           Progress& progress);

// memory_limits; where `host_memory` leaves it open, an equal part of what is free.
MemoryLimits own_memory(const Ranks& ranks, const torch::Device& device, int64_t host_memory,
                        int64_t gpu_memory);

// The part of `pieces` equal pieces of work, dealt in turn, that decides how long all of them take:
// of the process that gets most, if processes compute side by side. On a CPU those of a machine do
// as far as there are cores for the threads of each; what is left takes turns.
double longest_part(const Ranks& ranks, const torch::Device& device, size_t pieces);

}  // namespace oscar
