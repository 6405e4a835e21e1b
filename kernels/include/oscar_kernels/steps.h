// The numbers of a step on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "oscar/cache/steps.h"

namespace oscar {

// fill_step_numbers of every request, a thread each; all pointers in device memory. One launch in
// place of the thirty of tensor operations.
cudaError_t step_numbers(const StepParams& params, cudaStream_t stream);

}  // namespace oscar
