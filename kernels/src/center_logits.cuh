// What the centers of keys (codec.h) add to the logits of an INT2 page.
//
// A warp works out the logits of eight segments at once, 16 rows of one operand, as a piece begins;
// few pieces have more. So what a new segment costs is one read of shared memory. The rows are
// asked for with the queries, but into L2: where a piece begins, registers that hold them until
// the queries are there would make accumulators change registers in every page.
#pragma once

#include <climits>

#include "entry_ring.cuh"

namespace oscar {

// A segment's rows [2][head_dim] of the run's head; null behind segment `last`.
template <typename Config>
__device__ __forceinline__ const uint8_t* center_rows(const AttentionParams& p, const RunNote& run,
                                                      int segment, int last) {
  if (segment > last) return nullptr;
  return reinterpret_cast<const uint8_t*>(
      centers_of(p.centers, segment, run.item.head, p.num_kv_heads, Config::kHeadDim));
}

// Of page `page` of the run's request.
__device__ __forceinline__ int segment_of(const AttentionParams& p, const RunNote& run, int page) {
  return segment_of_page(run.first_position, p.windows.sink_tokens, page, p.centers.segments);
}

// Asks for eight segments from `first` on, as far as the warp has pages of them.
template <typename Config>
__device__ __forceinline__ void prefetch_centers(const AttentionParams& p, const RunNote& run,
                                                 int first, int lane) {
  constexpr int kLine = 128, kLines = kCenters * 2 * Config::kHeadDim / kLine;
  const int last = segment_of(p, run, run.piece_end - 1);
#pragma unroll
  for (int i = lane; i < kCenterBlock * kLines; i += 32) {
    const uint8_t* rows = center_rows<Config>(p, run, first + i / kLines, last);
    if (rows) ptx::prefetch_l2(rows + i % kLines * kLine);
  }
}
// Those of the piece that begins with `run`.
template <typename Config>
__device__ __forceinline__ void prefetch_centers(const AttentionParams& p, const RunNote& run,
                                                 int lane) {
  if (!p.centers.rows || run.exact) return;
  prefetch_centers<Config>(p, run, segment_of(p, run, run.first_page), lane);
}

// Keeps the logits of eight segments from `first` on, and makes those of `first`, which holds for
// pages before `end`, the current ones. Row g of sums is the first center of segment g, row g + 8
// the second.
template <typename Config>
__device__ __forceinline__ void keep_center_logits(const AttentionParams& p, const RunNote& run,
                                                   const float (&sums)[4], int first, int end,
                                                   ColdCursor* cold, float4* block, int lane) {
  const float half = 0.5f * p.sm_scale * kLog2E;
  const float4 logits = make_float4((sums[0] + sums[2]) * half, (sums[0] - sums[2]) * half,
                                    (sums[1] + sums[3]) * half, (sums[1] - sums[3]) * half);
  block[lane] = logits;
  if (lane < 4) cold->center_logits[lane] = logits;
  if (lane == 0) {
    cold->first_segment = first;
    cold->in_block = 0;
    cold->center_end = first + 1 < p.centers.segments ? end : INT_MAX;
    cold->block_end = first + kCenterBlock < p.centers.segments
                          ? end + (kCenterBlock - 1) * (kSegmentTokens / kPageTokens)
                          : INT_MAX;
  }
  prefetch_centers<Config>(p, run, first + kCenterBlock, lane);
  __syncwarp();
}

// The first centers of a piece; s.q are still the queries' bits.
template <typename Config>
__device__ __forceinline__ void begin_centers(const AttentionState<Config>& s,
                                              const AttentionParams& p, const RunNote& run,
                                              ColdCursor* cold, float4* block, int lane) {
  if (!p.centers.rows) {
    if (lane < 4) cold->center_logits[lane] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (lane == 0) cold->center_end = cold->block_end = INT_MAX;
    __syncwarp();
    return;
  }
  const int segment = segment_of(p, run, run.first_page);
  const int last = segment_of(p, run, run.piece_end - 1);
  const uint8_t* rows = center_rows<Config>(p, run, segment + lane / 4, last);
  uint32_t raw[kCenters][Config::kRowWords];
#pragma unroll
  for (int j = 0; j < kCenters; ++j) {
    fetch_code_dims<Config>(raw[j], rows ? rows + j * 2 * Config::kHeadDim : nullptr, lane);
  }
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < Config::kRowWords; i += 2) {
    ptx::mma_bf16(sums, raw[0][i], raw[1][i], raw[0][i + 1], raw[1][i + 1], s.q[i / 2][0],
                  s.q[i / 2][1]);
  }
  const int first_middle = run.first_position + p.windows.sink_tokens + kPageTokens / 2;
  const int end = ((segment + 1) * kSegmentTokens - first_middle + kPageTokens - 1) / kPageTokens;
  keep_center_logits<Config>(p, run, sums, segment, end, cold, block, lane);
}

// The next of the segments that were worked out together.
__device__ __forceinline__ void next_centers(const AttentionParams& p, ColdCursor* cold,
                                             const float4* block, int lane) {
  const int in_block = cold->in_block + 1;
  const bool last = cold->first_segment + in_block + 1 >= p.centers.segments;
  const int end = last ? INT_MAX : cold->center_end + kSegmentTokens / kPageTokens;
  __syncwarp();  // all lanes have read what changes now
  if (lane < 4) cold->center_logits[lane] = block[4 * in_block + lane];
  if (lane == 0) cold->in_block = in_block, cold->center_end = end;
  __syncwarp();
}

// The next eight segments of a piece, loaded little by little: most registers are taken. query: the
// lane's row of q, or null.
template <typename Config>
__device__ __forceinline__ void next_center_block(const AttentionParams& p, const RunNote& run,
                                                  const uint8_t* query, ColdCursor* cold,
                                                  float4* block, int lane) {
  using Layout = typename Config::Layout;
  constexpr int kBytes = Layout::kKeyRun < 8 ? 2 * Layout::kKeyRun : 16;  // loaded at a time
  constexpr int kLoads = 2 * Layout::kKeyRun / kBytes;                    // a run
  const int segment = cold->first_segment + kCenterBlock;
  const int end = cold->block_end + kSegmentTokens / kPageTokens;
  const int last = segment_of(p, run, run.piece_end - 1);
  const uint8_t* rows = center_rows<Config>(p, run, segment + lane / 4, last);
  float sums[4] = {};
  __syncwarp();  // all lanes have read what changes now
#pragma unroll 1
  for (int i = 0; i < Layout::kKeyRuns * kLoads; ++i) {
    const int at = 2 * Layout::key_run_dim(lane % 4, i / kLoads) + i % kLoads * kBytes;
    uint32_t a[kCenters][kBytes / 4] = {}, b[kBytes / 4] = {};
    if (query) load_words<kBytes>(b, query + at);
    if (rows) {
      load_words<kBytes>(a[0], rows + at);
      load_words<kBytes>(a[1], rows + 2 * Config::kHeadDim + at);
    }
#pragma unroll
    for (int w = 0; w < kBytes / 4; w += 2) {
      ptx::mma_bf16(sums, a[0][w], a[1][w], a[0][w + 1], a[1][w + 1], b[w], b[w + 1]);
    }
  }
  keep_center_logits<Config>(p, run, sums, segment, end, cold, block, lane);
}

}  // namespace oscar
