// Which warp reads what: the flattened list of cache pieces, split by bytes into equal shares.
//
// An item is one (request, KV head, column tile): `kColumns` (query, head) columns over all of a
// request's keys. Its entries are INT2 pages, then 16-token tiles of exact rows. An entry belongs
// to the warp whose share holds the entry's first byte. Everything is computed on the device from
// the lengths, so that a captured graph can be replayed with other lengths.
#pragma once

#include "oscar/cache/page_layout.h"

namespace oscar {

constexpr int kExactTile = 16;       // tokens of an exact entry
constexpr int kPlannedBatch = 4096;  // requests of one call, at most

// The lengths of one request, in entries.
struct RequestShape {
  int history = 0;  // INT2 tokens (of the bf16 twin: paged tokens)
  int history_entries = 0;
  int sink_tiles = 0, recent_tiles = 0;
  int seq_len = 0;
  __device__ int entries() const { return history_entries + sink_tiles + recent_tiles; }
};

struct EntryWeights {
  int history = 0, exact = 0;  // in units of 256 bytes
  __device__ int largest() const { return history > exact ? history : exact; }
  __device__ int item(const RequestShape& r) const {
    const int weight = r.history_entries * history + (r.sink_tiles + r.recent_tiles) * exact;
    return weight > 0 ? weight : 1;  // an empty request still owes its zeros
  }
  // Offset of entry e inside its item.
  __device__ int offset(const RequestShape& r, int e) const {
    const int paged = min(e, r.history_entries);
    return paged * history + (e - paged) * exact;
  }
  // First entry whose offset is >= x.
  __device__ int first_at(const RequestShape& r, int x) const {
    const int paged = r.history_entries * history;
    if (x <= paged) return history > 0 ? (x + history - 1) / history : 0;
    return r.history_entries + (x - paged + exact - 1) / exact;
  }
};

template <bool kPagedBf16>
__device__ inline RequestShape request_shape(const AttentionParams& p, int b) {
  RequestShape r;
  r.history = history_tokens(p.history, b);
  r.seq_len = p.seq_len[b];
  r.history_entries = kPagedBf16 ? (r.history + kExactTile - 1) / kExactTile
                                 : (r.history + kPageTokens - 1) / kPageTokens;
  const int sink = min(r.seq_len, p.windows.sink_tokens);
  const int recent = max(0, r.seq_len - p.windows.sink_tokens - r.history);
  r.sink_tiles = (sink + kExactTile - 1) / kExactTile;
  r.recent_tiles = (recent + kExactTile - 1) / kExactTile;
  return r;
}

// The whole call: prefix sums of item weights in shared memory, and how many blocks take part.
struct WorkPlan {
  const int* prefix;  // [batch + 1], weight before request b
  int total = 0;
  int blocks = 1;  // blocks that get work, each at least as much as the heaviest entry

  int share = 0, longer = 0;  // total / blocks; the first `longer` blocks get one unit more

  __device__ int block_begin(int block) const { return block * share + min(block, longer); }
  __device__ int block_of(int offset) const {
    const int split = longer * (share + 1);
    return offset < split ? offset / (share + 1) : longer + (offset - split) / share;
  }
  // The request that holds `offset`.
  __device__ int request_of(int offset, int batch) const {
    int low = 0, high = batch;  // prefix[low] <= offset < prefix[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (prefix[middle] <= offset ? low : high) = middle;
    }
    return low;
  }
};

// Fills prefix [batch + 1]; all threads of the block take part.
template <bool kPagedBf16>
__device__ inline WorkPlan make_plan(const AttentionParams& p, const EntryWeights& weights,
                                     int items_per_request, int* prefix) {
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int carry = 0;
  for (int base = 0; base < p.batch; base += blockDim.x) {
    const int b = base + threadIdx.x;
    const int own =
        b < p.batch ? weights.item(request_shape<kPagedBf16>(p, b)) * items_per_request : 0;
    int sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int before = carry, all = 0;
    for (int w = 0; w < warps; ++w) {
      if (w < warp) before += warp_sums[w];
      all += warp_sums[w];
    }
    if (b < p.batch) prefix[b] = before + sum - own;
    carry += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) prefix[p.batch] = carry;
  __syncthreads();
  WorkPlan plan;
  plan.prefix = prefix;
  plan.total = carry;
  plan.blocks = max(1, min(static_cast<int>(gridDim.x), carry / max(1, weights.largest())));
  plan.share = carry / plan.blocks;
  plan.longer = carry - plan.share * plan.blocks;
  return plan;
}

// A walk over the entries of one warp's share.
struct EntryCursor {
  RequestShape shape;
  int b = 0;  // request
  int head = 0, column_tile = 0;
  int entry = 0;  // entry of the item
  int base = 0;   // weight before the item
  int end = 0;    // the share ends before this weight
  bool live = false;
};

// To the first entry of the next item.
template <bool kPagedBf16>
__device__ inline void cursor_next_item(EntryCursor& c, const AttentionParams& p,
                                        const EntryWeights& weights, int column_tiles) {
  c.base += weights.item(c.shape);
  c.entry = 0;
  if (++c.column_tile < column_tiles) return;
  c.column_tile = 0;
  if (++c.head < p.num_kv_heads) return;
  c.head = 0;
  if (++c.b < p.batch) c.shape = request_shape<kPagedBf16>(p, c.b);
}

template <bool kPagedBf16>
__device__ inline EntryCursor cursor_begin(const AttentionParams& p, const WorkPlan& plan,
                                           const EntryWeights& weights, int column_tiles, int begin,
                                           int end) {
  EntryCursor c;
  c.end = end;
  if (begin >= end) return c;
  c.b = plan.request_of(begin, p.batch);
  c.shape = request_shape<kPagedBf16>(p, c.b);
  const int weight = weights.item(c.shape);
  const int item = (begin - plan.prefix[c.b]) / weight;
  c.head = item / column_tiles;
  c.column_tile = item % column_tiles;
  c.base = plan.prefix[c.b] + item * weight;
  c.entry = weights.first_at(c.shape, begin - c.base);
  if (c.entry >= max(1, c.shape.entries())) {  // only the tail of the last entry is in the share
    cursor_next_item<kPagedBf16>(c, p, weights, column_tiles);
  }
  c.live = c.b < p.batch && c.base + weights.offset(c.shape, c.entry) < c.end;
  return c;
}

// Moves to the next entry of the share.
template <bool kPagedBf16>
__device__ inline void cursor_next(EntryCursor& c, const AttentionParams& p,
                                   const EntryWeights& weights, int column_tiles) {
  if (++c.entry >= max(1, c.shape.entries())) {
    cursor_next_item<kPagedBf16>(c, p, weights, column_tiles);
  }
  c.live = c.b < p.batch && c.base + weights.offset(c.shape, c.entry) < c.end;
}

}  // namespace oscar
