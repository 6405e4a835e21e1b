// Ranges of work on the threads of libtorch.
#pragma once

#include <cstdint>
#include <functional>

namespace oscar {

// Calls work(begin, end) for ranges that cover [0, count) once, as many at the same time as
// torch::get_num_threads() says, none but the last shorter than `grain`. Operations of torch
// within `work` stay on the thread that calls them, unlike those within parallel_for of
// oscar/base/process.h, and a thread has neither the caller's grad mode nor its inference mode.
// What `work` throws first is thrown here.
void side_by_side(int64_t count, int64_t grain,
                  const std::function<void(int64_t begin, int64_t end)>& work);

}  // namespace oscar
