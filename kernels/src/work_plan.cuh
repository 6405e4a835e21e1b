// Which warp reads what: the flattened list of cache pieces, split by bytes into equal shares.
//
// An item is one (request, KV head, column tile): a few (query, head) columns over all of a
// request's keys. Its entries are INT2 pages, then 8-token tiles of exact rows. An entry belongs
// to the warp whose share holds the entry's first byte. Everything is computed on the device from
// the lengths, so that a captured graph can be replayed with other lengths.
#pragma once

#include "oscar/cache/pages.h"

namespace oscar {

constexpr int kExactTile = 8;        // tokens of an exact entry
constexpr int kPlannedBatch = 4096;  // requests of one call, at most

// The lengths of one request, in entries.
struct RequestShape {
  int history = 0;  // INT2 tokens (of the BF16 baseline: paged tokens)
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
    if (x <= paged) return (x + history - 1) / history;
    return r.history_entries + (x - paged + exact - 1) / exact;
  }
};

template <bool kPagedBf16>
__device__ __forceinline__ RequestShape request_shape(const AttentionParams& p, int b) {
  constexpr int kEntryTokens = kPagedBf16 ? kExactTile : kPageTokens;
  RequestShape r;
  const int history = p.history.history_len[b];  // read together with the other
  r.seq_len = p.seq_lens[b];
  r.history = r.seq_len > 0 ? history : 0;
  r.history_entries = (r.history + kEntryTokens - 1) / kEntryTokens;
  const int sink = min(r.seq_len, p.windows.sink_tokens);
  const int recent = max(0, r.seq_len - p.windows.sink_tokens - r.history);
  r.sink_tiles = (sink + kExactTile - 1) / kExactTile;
  r.recent_tiles = (recent + kExactTile - 1) / kExactTile;
  return r;
}

// What lane `lane` has. All lanes take part.
__device__ __forceinline__ RequestShape shape_of_lane(const RequestShape& own, int lane) {
  RequestShape r;
  r.history = __shfl_sync(~0u, own.history, lane);
  r.history_entries = __shfl_sync(~0u, own.history_entries, lane);
  r.sink_tiles = __shfl_sync(~0u, own.sink_tiles, lane);
  r.recent_tiles = __shfl_sync(~0u, own.recent_tiles, lane);
  r.seq_len = __shfl_sync(~0u, own.seq_len, lane);
  return r;
}

// Exact quotients x / d of x * d < 2^32 by one product.
struct Divisor {
  int d = 1;
  uint32_t reciprocal = 0;  // ceil(2^32 / d), 0 for 1
};
inline Divisor divisor(int d) {
  return {d, d == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + d - 1) / d)};
}
__device__ __forceinline__ int quotient(int x, const Divisor& by) {
  return by.d == 1 ? x : static_cast<int>(__umulhi(static_cast<uint32_t>(x), by.reciprocal));
}

// What the launch knows of the plan.
struct PlanShape {
  Divisor blocks_per_item;  // where no block would have parts of two items; d = 0: nowhere
  Divisor items_per_request, warps;
};

// Below this weight a block, joining costs more than idle blocks do.
constexpr int kAlignedShare = 6000;

inline PlanShape plan_shape(int grid, int batch, int items_per_request, int warps) {
  PlanShape shape{{0, 0}, divisor(items_per_request), divisor(warps)};
  const int64_t items = static_cast<int64_t>(batch) * items_per_request;
  const int each = static_cast<int>(grid / items);
  if (each > 0 && each * items * 16 >= grid * 15) shape.blocks_per_item = divisor(each);
  return shape;
}

// Equal shares of the whole call: `block_count` blocks share each stretch of `period` weight. One
// stretch, or one an item where all items weigh the same and few blocks would be left idle: then no
// block has parts of two items to join.
struct WorkPlan {
  int blocks = 1;  // blocks that get work, each at least as much as the heaviest entry
  int period = 0, block_count = 1;
  int share = 0, longer = 0;  // period / block_count; the first `longer` blocks get one unit more
  __device__ int block_begin(int block) const {
    int before = 0;
    if (block_count < blocks) {
      before = block / block_count;
      block -= before * block_count;
    }
    return before * period + block * share + min(block, longer);
  }
  __device__ int block_of(int offset) const {
    int before = 0;
    if (block_count < blocks) {
      before = offset / period;
      offset -= before * period;
    }
    const int split = longer * (share + 1);
    const int in_period = offset < split ? offset / (share + 1) : longer + (offset - split) / share;
    return before * block_count + in_period;
  }
};

__device__ inline WorkPlan plan_of(int total, const EntryWeights& weights) {
  WorkPlan plan;
  plan.blocks = max(1, min(static_cast<int>(gridDim.x), total / weights.largest()));
  plan.period = total;
  plan.block_count = plan.blocks;
  plan.share = plan.period / plan.block_count;
  plan.longer = plan.period - plan.share * plan.block_count;
  return plan;
}

// The plan for items of equal weight, if it is one stretch an item: then blocks is not 0.
__device__ __forceinline__ WorkPlan aligned_plan(int item_weight, int items, const PlanShape& shape,
                                                 const EntryWeights& weights) {
  WorkPlan plan;
  const int grid = static_cast<int>(gridDim.x), total = item_weight * items;
  const bool aligned = shape.blocks_per_item.d > 0 && total < kAlignedShare * grid &&
                       total >= weights.largest() * grid;
  plan.blocks = aligned ? shape.blocks_per_item.d * items : 0;
  plan.period = item_weight;
  plan.block_count = shape.blocks_per_item.d;
  plan.share = quotient(plan.period, shape.blocks_per_item);
  plan.longer = plan.period - plan.share * plan.block_count;
  return plan;
}

// Shares [first, end) of warp `warp` in a block's.
struct WarpShare {
  int first, end;
};
__device__ __forceinline__ WarpShare warp_share(int begin, int end, int warp,
                                                const Divisor& warps) {
  const int share = quotient(end - begin, warps), longer = end - begin - share * warps.d;
  const int first = begin + warp * share + min(warp, longer);
  return {first, first + share + (warp < longer)};
}

// prefix[b] = weight before request b, prefix[batch] = all. Warps 0 .. kWarps - 1 of the block take
// part and synchronise; one warp needs no barrier. Returns the whole weight.
template <bool kPagedBf16, bool kOneWarp>
__device__ inline int weigh_requests(const AttentionParams& p, const EntryWeights& weights,
                                     int items_per_request, int* prefix) {
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int threads = kOneWarp ? 32 : blockDim.x;
  int carry = 0;
#pragma unroll 1
  for (int base = 0; base < p.batch; base += threads) {
    const int b = base + threadIdx.x;
    const int own =
        b < p.batch ? weights.item(request_shape<kPagedBf16>(p, b)) * items_per_request : 0;
    int sum = own;
#pragma unroll 1
    for (int step = 1; step < min(32, p.batch); step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    int before = carry, all = __shfl_sync(~0u, sum, 31);
    if constexpr (!kOneWarp) {
      if (lane == 0) warp_sums[warp] = all;
      __syncthreads();
      all = 0;
#pragma unroll 1
      for (int w = 0; w < min(threads, p.batch - base + 31) / 32; ++w) {
        if (w < warp) before += warp_sums[w];
        all += warp_sums[w];
      }
      __syncthreads();
    } else {
      all = __shfl_sync(~0u, sum, min(32, p.batch) - 1);
    }
    if (b < p.batch) prefix[b] = before + sum - own;
    carry += all;
  }
  if (threadIdx.x == 0) prefix[p.batch] = carry;
  kOneWarp ? __syncwarp() : __syncthreads();
  return carry;
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

// Goes on to the next item when the cursor's is done, and sees whether the share goes on.
template <bool kPagedBf16>
__device__ __forceinline__ void cursor_settle(EntryCursor& c, const AttentionParams& p,
                                              const EntryWeights& weights, int column_tiles) {
  if (c.entry >= max(1, c.shape.entries())) {
    c.base += weights.item(c.shape);
    c.entry = 0;
    if (++c.column_tile == column_tiles) {
      c.column_tile = 0;
      if (++c.head == p.num_kv_heads) {
        c.head = 0;
        if (++c.b < p.batch) c.shape = request_shape<kPagedBf16>(p, c.b);
      }
    }
  }
  c.live = c.b < p.batch && c.base + weights.offset(c.shape, c.entry) < c.end;
}

template <bool kPagedBf16>
__device__ inline EntryCursor cursor_begin(const AttentionParams& p, const EntryWeights& weights,
                                           const int* prefix, int column_tiles, int begin,
                                           int end) {
  EntryCursor c;
  c.end = end;
  if (begin >= end) return c;
  int high = p.batch;  // prefix[c.b] <= begin < prefix[high]
#pragma unroll 1
  while (high - c.b > 1) {
    const int middle = (c.b + high) / 2;
    (prefix[middle] <= begin ? c.b : high) = middle;
  }
  c.shape = request_shape<kPagedBf16>(p, c.b);
  const int weight = weights.item(c.shape);
  const int item = (begin - prefix[c.b]) / weight;
  c.head = item;
  if (column_tiles > 1) {
    c.head = item / column_tiles;
    c.column_tile = item - c.head * column_tiles;
  }
  c.base = prefix[c.b] + item * weight;
  c.entry = weights.first_at(c.shape, begin - c.base);
  cursor_settle<kPagedBf16>(c, p, weights, column_tiles);  // begin may lie in the last entry
  return c;
}

// The same where every item has blocks of its own; its requests all weigh item_weight an item, and
// lane b has the shape of request b.
template <bool kPagedBf16>
__device__ __forceinline__ EntryCursor aligned_cursor(
    const AttentionParams& p, const EntryWeights& weights, const PlanShape& plan, int column_tiles,
    int item_weight, int item, const WarpShare& share, const RequestShape& of_lane) {
  EntryCursor c;
  c.end = share.end;
  if (share.first >= share.end) return c;
  c.b = quotient(item, plan.items_per_request);
  c.shape = shape_of_lane(of_lane, c.b);
  c.head = item - c.b * plan.items_per_request.d;
  if (column_tiles > 1) {
    const int tiles = c.head;
    c.head = tiles / column_tiles;
    c.column_tile = tiles - c.head * column_tiles;
  }
  c.base = item * item_weight;
  c.entry = weights.first_at(c.shape, share.first - c.base);
  cursor_settle<kPagedBf16>(c, p, weights, column_tiles);
  return c;
}

}  // namespace oscar
