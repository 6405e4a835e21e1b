// Quantization with noise-shaped rounding or metric scale correction (compiled apart).
#pragma once

#include <cuda_runtime_api.h>

#include "oscar/cache/pages.h"

namespace oscar {

template <int kHeadDim>
cudaError_t quantize_shaped(const AppendParams& params, int max_new_history, cudaStream_t stream);

}  // namespace oscar
