// Launches one attention instantiation; shared by the files that hold them.
#pragma once

#include <algorithm>

#include "attention_kernel.cuh"
#include "device_limits.cuh"
#include "oscar_kernels/attention.h"

namespace oscar {

inline size_t align_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Of the largest instantiation: pieces of 16 warps, and one part, a block. The parts lie first, in
// a place that is the same for all instantiations, since they have to stay zero between calls.
inline size_t partial_bytes(int head_dim) { return 8 * (4 * static_cast<size_t>(head_dim) + 8); }
inline size_t sent_parts_bytes(int blocks) { return align_up(blocks * partial_bytes(256)); }
inline size_t workspace_bytes_for(int head_dim, int blocks) {
  return sent_parts_bytes(blocks) + align_up(blocks * 16 * partial_bytes(head_dim));
}

template <typename Config>
cudaError_t launch_attention(const AttentionParams& p, uint8_t* workspace, size_t workspace_bytes,
                             int unsettled_pages, cudaStream_t stream) {
  DeviceLimits limits;
  cudaError_t error = device_limits(&limits);
  if (error != cudaSuccess) return error;
  int warps = Config::kMaxWarps;
  constexpr size_t kDeclared = 1536;  // at most what the kernel declares itself
  const bool centers = !Config::kPagedBf16 && p.centers.rows;
  const auto fits = [&](bool with_heads) {
    return BlockMemory<Config>::bytes(warps, p.batch, with_heads, centers) + kDeclared <=
           static_cast<size_t>(limits.shared_bytes);
  };
  while (warps > 1 && !fits(false)) --warps;
  const bool with_heads = fits(true);
  const size_t shared = BlockMemory<Config>::bytes(warps, p.batch, with_heads, centers);
  const size_t sent = sent_parts_bytes(limits.blocks);
  const int blocks = std::min(limits.blocks, Config::kMaxBlocks);
  if (sent + static_cast<size_t>(blocks) * warps * Config::kPartialBytes > workspace_bytes) {
    return cudaErrorInvalidValue;
  }
  const AttentionWorkspace ws = {workspace, with_heads ? nullptr : workspace + sent};
  error =
      cudaFuncSetAttribute(decode_attention_kernel<Config>,
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  ColumnShape shape;
  shape.heads_per_kv = p.num_qo_heads / p.num_kv_heads;
  shape.columns = p.q_len * shape.heads_per_kv;
  shape.column_tiles = (shape.columns + Config::kColumns - 1) / Config::kColumns;
  shape.reciprocal = (65536u + shape.heads_per_kv - 1) / shape.heads_per_kv;
  const PlanShape plan = plan_shape(blocks, p.batch, p.num_kv_heads * shape.column_tiles, warps);
  const EarlyLaunch launch(dim3(blocks), warps * 32, shared, stream, limits);
  return cudaLaunchKernelEx(&launch.config, decode_attention_kernel<Config>, p, shape, plan, ws,
                            unsettled_pages);
}

}  // namespace oscar
