// Instantiations of decode attention.
#include "attention_instances.h"

#include "attention_launch.cuh"

namespace oscar {

template <int kHeadDim, int kGroupSize, MetadataDtype kMetadata, PackOrder kOrder>
cudaError_t attention_instance(const AttentionParams& params, uint8_t* workspace,
                               size_t workspace_bytes, cudaStream_t stream) {
  return launch_attention<
      AttentionConfig<kHeadDim, kHeadDim / kGroupSize, kMetadata, kOrder, 1, false>>(
      params, workspace, workspace_bytes, stream);
}

template <int kHeadDim>
cudaError_t attention_twin(const AttentionParams& params, uint8_t* workspace,
                           size_t workspace_bytes, cudaStream_t stream) {
  return launch_attention<
      AttentionConfig<kHeadDim, 1, MetadataDtype::kFp16, PackOrder::kConsecutive, 1, true>>(
      params, workspace, workspace_bytes, stream);
}

#define OSCAR_INSTANCE(kDim, kGroup, kMeta, kOrder)                     \
  template cudaError_t attention_instance<kDim, kGroup, kMeta, kOrder>( \
      const AttentionParams&, uint8_t*, size_t, cudaStream_t);
#define OSCAR_TWIN(kDim) \
  template cudaError_t attention_twin<kDim>(const AttentionParams&, uint8_t*, size_t, cudaStream_t);
#include "attention_instances.inc"
#undef OSCAR_INSTANCE
#undef OSCAR_TWIN

}  // namespace oscar
