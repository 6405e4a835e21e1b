// What the memory limit of a container leaves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>

namespace oscar {

inline constexpr int64_t kNoMemoryLimit = std::numeric_limits<int64_t>::max();

// Bytes that this process' control group and those above it still allow, without what they can drop
// (pages of files); kNoMemoryLimit where none of them has a limit. `membership` says which they
// are, and `mount` has them, as version 2 or version 1 of Linux' control groups.
int64_t control_group_memory(const std::filesystem::path& membership = "/proc/self/cgroup",
                             const std::filesystem::path& mount = "/sys/fs/cgroup");

}  // namespace oscar
