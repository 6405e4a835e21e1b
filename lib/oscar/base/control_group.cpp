// Files of a few numbers.
#include "oscar/base/control_group.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace oscar {
namespace {

namespace fs = std::filesystem;

struct Names {
  const char *limits[2], *used, *droppable[2];
};
// Above "high" processes are slowed down until next to nothing moves.
constexpr Names kVersion2 = {
    {"memory.max", "memory.high"}, "memory.current", {"inactive_file", "active_file"}};
constexpr Names kVersion1 = {{"memory.limit_in_bytes", "memory.limit_in_bytes"},
                             "memory.usage_in_bytes",
                             {"total_inactive_file", "total_active_file"}};

// kNoMemoryLimit where there is no number: no such file, or "max".
int64_t number_in(const fs::path& file) {
  std::ifstream stream(file);
  int64_t number = 0;
  return stream >> number ? number : kNoMemoryLimit;
}

int64_t left_in(const fs::path& group, const Names& names) {
  const int64_t limit =
      std::min(number_in(group / names.limits[0]), number_in(group / names.limits[1]));
  const int64_t used = number_in(group / names.used);
  if (limit == kNoMemoryLimit || used == kNoMemoryLimit) return kNoMemoryLimit;
  int64_t kept = used;
  std::ifstream statistics(group / "memory.stat");
  int64_t bytes = 0;
  for (std::string name; statistics >> name >> bytes;) {
    if (name == names.droppable[0] || name == names.droppable[1]) kept -= bytes;
  }
  return std::max<int64_t>(0, limit - std::max<int64_t>(0, kept));
}

// Of the group and of those above it. A container sees itself as the mount, whatever its path.
int64_t least_left(const fs::path& mount, const fs::path& path, const Names& names) {
  int64_t left = left_in(mount, names);
  fs::path group = mount;
  for (const fs::path& part : path.relative_path()) {
    group /= part;
    left = std::min(left, left_in(group, names));
  }
  return left;
}

}  // namespace

int64_t control_group_memory(const fs::path& membership, const fs::path& mount) {
  int64_t left = kNoMemoryLimit;
  std::ifstream groups(membership);
  for (std::string line; std::getline(groups, line);) {  // number:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) left = std::min(left, least_left(mount, path, kVersion2));
    if (controllers == "memory") {
      left = std::min(left, least_left(mount / "memory", path, kVersion1));
    }
  }
  return left;
}

}  // namespace oscar
