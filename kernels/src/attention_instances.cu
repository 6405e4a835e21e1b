// Instantiations of decode attention.
#include "attention_instances.h"

#include "attention_launch.cuh"

namespace oscar {

template <int kHeadDim, int kGroupSize, MetadataDtype kMetadata>
cudaError_t attention_instance(const AttentionParams& params, uint8_t* workspace,
                               size_t workspace_bytes, int unsettled_pages, cudaStream_t stream) {
  constexpr int kGroups = kHeadDim / kGroupSize;
  const bool paired = params.q_len * (params.num_qo_heads / params.num_kv_heads) <= 4;
  return paired ? launch_attention<AttentionConfig<kHeadDim, kGroups, kMetadata, true, false>>(
                      params, workspace, workspace_bytes, unsettled_pages, stream)
                : launch_attention<AttentionConfig<kHeadDim, kGroups, kMetadata, false, false>>(
                      params, workspace, workspace_bytes, unsettled_pages, stream);
}

template <int kHeadDim>
cudaError_t attention_bf16_baseline(const AttentionParams& params, uint8_t* workspace,
                                    size_t workspace_bytes, int unsettled_pages,
                                    cudaStream_t stream) {
  return launch_attention<AttentionConfig<kHeadDim, 1, MetadataDtype::kFp16, false, true>>(
      params, workspace, workspace_bytes, unsettled_pages, stream);
}

#define OSCAR_INSTANCE(kDim, kGroup, kMeta)                                                      \
  template cudaError_t attention_instance<kDim, kGroup, kMeta>(const AttentionParams&, uint8_t*, \
                                                               size_t, int, cudaStream_t);
#define OSCAR_BF16_BASELINE(kDim)                                                              \
  template cudaError_t attention_bf16_baseline<kDim>(const AttentionParams&, uint8_t*, size_t, \
                                                     int, cudaStream_t);
#include "attention_instances.inc"
#undef OSCAR_INSTANCE
#undef OSCAR_BF16_BASELINE

}  // namespace oscar
