// Entry points of decode attention: checks, and the choice of an instantiation.
#include "attention_instances.h"
#include "attention_launch.cuh"

namespace oscar {

bool valid_attention(const AttentionParams& p) {
  const PageFormat& f = p.format;
  if (p.batch <= 0 || p.batch > kPlannedBatch || p.num_kv_heads <= 0 || p.q_len < 1) return false;
  if (p.q_len > 4 || p.num_qo_heads <= 0 || p.num_qo_heads % p.num_kv_heads != 0) return false;
  if (f.head_dim != 64 && f.head_dim != 128 && f.head_dim != 256) return false;
  if (f.rows.quant_group_size <= 0 || f.head_dim % f.rows.quant_group_size != 0) return false;
  if (p.centers.rows && p.centers.segments <= 0) return false;
  if (p.windows.sink_tokens < 0 || p.windows.ring_tokens <= 0) return false;
  if (p.history.table_stride < 0 || !p.history.history_len || !p.seq_lens || !p.q || !p.o) {
    return false;
  }
  return p.num_qo_heads / p.num_kv_heads <= 16;
}

cudaError_t decode_attention_workspace(const AttentionParams& params, size_t* bytes) {
  DeviceLimits limits;
  const cudaError_t error = device_limits(&limits);
  if (error != cudaSuccess) return error;
  *bytes = workspace_bytes_for(params.format.head_dim, limits.blocks);
  return cudaSuccess;
}

cudaError_t decode_attention_prepare(void* workspace, size_t bytes, cudaStream_t stream) {
  return cudaMemsetAsync(workspace, 0, bytes, stream);
}

cudaError_t decode_attention(const AttentionParams& params, void* workspace, size_t workspace_bytes,
                             cudaStream_t stream, int unsettled_pages) {
  if (!valid_attention(params)) return cudaErrorInvalidValue;
  uint8_t* ws = static_cast<uint8_t*>(workspace);
#define OSCAR_INSTANCE(kDim, kGroup, kMeta)                                                      \
  if (params.format.head_dim == kDim && params.format.rows.quant_group_size == kGroup &&         \
      params.format.rows.metadata == kMeta) {                                                    \
    return attention_instance<kDim, kGroup, kMeta>(params, ws, workspace_bytes, unsettled_pages, \
                                                   stream);                                      \
  }
#include "attention_instances.inc"
#undef OSCAR_INSTANCE
  return cudaErrorNotSupported;
}

cudaError_t decode_attention_bf16(const AttentionParams& params, void* workspace,
                                  size_t workspace_bytes, cudaStream_t stream) {
  if (!valid_attention(params)) return cudaErrorInvalidValue;
  uint8_t* ws = static_cast<uint8_t*>(workspace);
#define OSCAR_BF16_BASELINE(kDim)     \
  if (params.format.head_dim == kDim) \
    return attention_bf16_baseline<kDim>(params, ws, workspace_bytes, -1, stream);
#include "attention_instances.inc"
#undef OSCAR_BF16_BASELINE
  return cudaErrorNotSupported;
}

}  // namespace oscar
