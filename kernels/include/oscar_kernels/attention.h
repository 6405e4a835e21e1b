// Paged INT2 decode attention on the GPU, and its BF16 baseline. No torch, no allocation, no
// waiting.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "oscar/cache/pages.h"

namespace oscar {

// Bytes of workspace for any call with up to these sizes on the current device.
cudaError_t decode_attention_workspace(const AttentionParams& params, size_t* bytes);

// Whether the sizes of a call fit together.
bool valid_attention(const AttentionParams& params);

// Prepares a fresh workspace (zeroes it). Once; every call that runs to its end leaves it ready
// again, so one workspace serves any number of calls that follow each other on one stream.
cudaError_t decode_attention_prepare(void* workspace, size_t bytes, cudaStream_t stream);

// Attention of params.q over sink, INT2 history and recent rows (AttentionParams); all pointers in
// device memory, pool and rows 16-byte aligned. One kernel launch; lengths and block table are read
// on the device, so a captured graph can be replayed after they changed (batch stays).
// The same inputs give the same bits. Returns cudaErrorInvalidValue for sizes that do not fit
// together and cudaErrorNotSupported for shapes this build has no instantiation of.
//
// From sm_90 on the launch begins before the kernel directly ahead of it in the stream has ended,
// and by default reads nothing until then. unsettled_pages >= 0 promises that the kernel ahead
// writes neither seq_lens nor history.block_table nor history.history_len nor windows.slot nor
// centers.first_position, and of each request's pages at most the last
// unsettled_pages (behind append_rows: 1 + (rows demoted + 62) / 64). Then the plan is made, and
// the first of the other pages asked for, while it still runs. Queries, exact rows, centers and the
// workspace are touched only after it has ended.
cudaError_t decode_attention(const AttentionParams& params, void* workspace, size_t workspace_bytes,
                             cudaStream_t stream, int unsettled_pages = -1);

// The same skeleton over bf16 pages, as a baseline: a page holds K [64][d] then V [64][d] in bf16;
// params.format supplies head_dim only.
cudaError_t decode_attention_bf16(const AttentionParams& params, void* workspace,
                                  size_t workspace_bytes, cudaStream_t stream);

}  // namespace oscar
