// The only source that includes torch's parallel_for: a template, which without the compiler's
// OpenMP is a plain loop. lib/CMakeLists.txt compiles this file with it.
#include "oscar/model/side_by_side.h"

#include <ATen/Parallel.h>

#ifndef _OPENMP
#error "at::parallel_for would be a plain loop"
#endif

namespace oscar {

void side_by_side(int64_t count, int64_t grain,
                  const std::function<void(int64_t begin, int64_t end)>& work) {
  at::parallel_for(0, count, grain, work);
}

}  // namespace oscar
