// Where rows that enter the INT2 history come from and go to, shared by the append kernels.
#pragma once

#include "row_centers.cuh"

namespace oscar {

struct HistoryRow {
  const uint16_t* x = nullptr;  // bf16 source
  uint8_t* page_data = nullptr;
  int in_page = 0;
};

// Or-s bits into the status of the request of this block (blockIdx.y). Looks up the slot here,
// where hardly any block comes, and not ahead.
__device__ inline void report_refused(const AppendParams& p, int bits) {
  if (p.status) atomicOr(p.status + slot_of(p.windows, static_cast<int>(blockIdx.y)), bits);
}

// Row of history token `token` of request b.
__device__ inline HistoryRow history_row(const AppendParams& p, int b, int token, int head,
                                         int side) {
  const int position = p.windows.sink_tokens + token, old_len = p.old_len[b];
  HistoryRow row;
  if (position >= old_len) {
    row.x = row_at(side ? p.v : p.k, p.query_start_loc[b] + position - old_len, head);
  } else {
    row.x = (side ? p.windows.v : p.windows.k) +
            window_offset(p.windows, slot_of(p.windows, b), head, p.num_kv_heads,
                          window_row(p.windows, position), p.format.head_dim);
  }
  const int64_t page = page_of_token(p.history, b, token);
  row.page_data = p.history.pool + (page * p.num_kv_heads + head) * page_bytes(p.format);
  row.in_page = token % kPageTokens;
  return row;
}

// Chooses the centers of keys of history tokens [first, end) of a (request, head), at most 32 for a
// warp and so of two pages. All lanes take part.
template <int kHeadDim>
struct WarpCenters {
  int page = -1;  // place in the table of those of the first row's page; negative: rows have none
  int next = -1;  // of the page after
  int first;

  __device__ __forceinline__ WarpCenters(const AppendParams& p, int b, int head, int side,
                                         int first_token)
      : first(first_token) {
    if (side != 0 || !p.centers.rows) return;
    const int position = p.centers.first_position ? p.centers.first_position[b] : 0;
    const auto of_page = [&](int at) {
      const int segment = segment_of_page(position, p.windows.sink_tokens, at, p.centers.segments);
      return (segment * p.num_kv_heads + head) * kCenters * kHeadDim;
    };
    page = of_page(first / kPageTokens);
    next = of_page(first / kPageTokens + 1);
  }
  __device__ __forceinline__ bool any() const { return page >= 0; }
  __device__ __forceinline__ CenterScores<kHeadDim> scores(const AppendParams& p) const {
    return CenterScores<kHeadDim>(p.centers.rows + page, p.centers.rows + next);
  }
  // The place of the nearer center of token `token`, row g of eight of which lane 4 g + t has a
  // quarter.
  __device__ __forceinline__ int nearer(const CenterScores<kHeadDim>& scores,
                                        const QuarterRow<kHeadDim>& row, int token) const {
    const bool on_next = token / kPageTokens != first / kPageTokens;
    const uint32_t second = scores.second(row) >> (threadIdx.x % 32 / 4 * 4 + on_next) & 1;
    return (on_next ? next : page) + static_cast<int>(second) * kHeadDim;
  }
};

// The place of the center of row `lane` of a warp's 32 from `first` on; rows beyond `end` repeat
// the last one. Negative where rows have none.
template <int kHeadDim>
__device__ __forceinline__ int choose_centers(const AppendParams& p, int b, int head, int side,
                                              int first, int end) {
  const WarpCenters<kHeadDim> centers(p, b, head, side, first);
  if (!centers.any()) return -1;
  const int lane = threadIdx.x % 32;
  const CenterScores<kHeadDim> scores = centers.scores(p);
  int own = -1;
#pragma unroll
  for (int at = 0; at < 32; at += 8) {
    const int token = min(first + at + lane / 4, end - 1);
    QuarterRow<kHeadDim> x;
    x.load(history_row(p, b, token, head, side).x, lane % 4);
    const int chosen = __shfl_sync(~0u, centers.nearer(scores, x, token), lane % 8 * 4);
    if (lane / 8 == at / 8) own = chosen;
  }
  return own;
}

__device__ inline void store_scale_zero(const PageFormat& f, const HistoryRow& row, int side,
                                        int group, ScaleZero sz) {
  uint8_t* at = row.page_data + metadata_offset(f, side, row.in_page);
  if (f.rows.metadata == MetadataDtype::kFp32) {
    reinterpret_cast<float2*>(at)[group] = make_float2(sz.scale, sz.zero);
  } else if (f.rows.metadata == MetadataDtype::kFp16) {
    reinterpret_cast<uint32_t*>(at)[group] =
        float_to_fp16(sz.scale) | static_cast<uint32_t>(float_to_fp16(sz.zero)) << 16;
  } else {
    reinterpret_cast<uint32_t*>(at)[group] =
        float_to_bf16(sz.scale) | static_cast<uint32_t>(float_to_bf16(sz.zero)) << 16;
  }
}

// The pair of a refused row: what store_scale_zero() makes kRefusedMetadata of.
__device__ inline ScaleZero refused_scale_zero() {
  const float nan = __uint_as_float(kRefusedMetadata);
  return {nan, nan};
}

}  // namespace oscar
