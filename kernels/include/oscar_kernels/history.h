// Rows of the paged history read back on the GPU, for attention of many queries over them.
#pragma once

#include <cuda_runtime_api.h>

#include "oscar/cache/pages.h"

namespace oscar {

// Whether the sizes of a call fit together; strides are multiples of 16 bytes.
bool valid_history(const HistoryRowsParams& params);

// One launch, sized by params.tokens; lengths and block table are read on the device. All pointers
// in device memory, 16-byte aligned. The numbers of dequantize_history_ref, to the bit. No
// allocation, no waiting. Returns cudaErrorInvalidValue where !valid_history(params).
cudaError_t dequantize_history(const HistoryRowsParams& params, cudaStream_t stream);

}  // namespace oscar
