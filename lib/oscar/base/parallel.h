// Loops whose steps run side by side on the processor's cores.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>

namespace oscar {

// Calls work(0) to work(count - 1), in the calling thread and in others beside it, and returns when
// all have ended. A process has as many threads as it may use cores, over all calls: one within
// another takes what is left, which may be none, so loops can be nested freely. (What a bundle's
// writing does beside them waits for the disk, and is not counted.) What a step does must not
// depend on the others. When steps throw, later ones are not begun, and the exception of the first
// in order is thrown. `most_threads`: for work that more threads do no faster.
void parallel_for(int64_t count, const std::function<void(int64_t)>& work,
                  int64_t most_threads = std::numeric_limits<int64_t>::max());

// The cores of a process: at least 1.
int64_t parallel_cores();

}  // namespace oscar
