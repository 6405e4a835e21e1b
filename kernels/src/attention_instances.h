// Declares the instantiations of decode attention, which are compiled in files of their own.
#pragma once

#include <cuda_runtime_api.h>

#include "oscar/cache/pages.h"

namespace oscar {

template <int kHeadDim, int kGroupSize, MetadataDtype kMetadata>
cudaError_t attention_instance(const AttentionParams& params, uint8_t* workspace,
                               size_t workspace_bytes, int unsettled_pages, cudaStream_t stream);
template <int kHeadDim>
cudaError_t attention_bf16_baseline(const AttentionParams& params, uint8_t* workspace,
                                    size_t workspace_bytes, int unsettled_pages,
                                    cudaStream_t stream);

}  // namespace oscar
