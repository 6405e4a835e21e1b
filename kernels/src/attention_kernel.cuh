// Paged decode attention: persistent warps over equal shares of the cache's bytes, one launch.
#pragma once

#include "attention_merge.cuh"
#include "entry_ring.cuh"
#include "exact_tile.cuh"
#include "int2_tile.cuh"

namespace oscar {

// Parts of the caller's workspace.
struct AttentionWorkspace {
  uint8_t* sent_parts;  // [blocks] of items that go on in later blocks; zero between launches
  uint8_t* head_parts;  // [blocks][warps] pieces of items that ended inside a warp's share
};

// The whole plan and this block's share.
struct BlockPlan {
  WorkPlan all;
  int begin, end;
};

// Shared memory of a block: warps' rings, then their notes and barriers, then the plan.
template <typename Config>
struct BlockMemory {
  uint8_t* base;
  int warps;
  __device__ uint8_t* ring(int warp) const { return base + warp * Config::kRingBytes; }
  __device__ RunNote* notes(int warp) const {
    return reinterpret_cast<RunNote*>(ring(warps)) + warp * kRunNotes;
  }
  __device__ ColdCursor* cold(int warp) const {
    return reinterpret_cast<ColdCursor*>(notes(warps)) + warp;
  }
  __device__ PieceNote* pieces() const {  // [2 * warps]: head, then tail, of each warp
    return reinterpret_cast<PieceNote*>(cold(warps));
  }
  __device__ uint64_t* barriers(int warp) const {
    return reinterpret_cast<uint64_t*>(pieces() + 2 * warps) + warp * Config::kSlots;
  }
  __device__ int* prefix() const { return reinterpret_cast<int*>(barriers(warps)); }
  static size_t bytes(int warps, int batch) {
    return static_cast<size_t>(warps) *
               (Config::kRingBytes + kRunNotes * sizeof(RunNote) + sizeof(ColdCursor) +
                2 * sizeof(PieceNote) + Config::kSlots * sizeof(uint64_t)) +
           sizeof(int) * (batch + 1);
  }
};

// Joins the pieces that the block's warps left behind. All threads take part. An item's last block
// waits for the parts of those before it, which are started no later and do not wait before they
// have sent theirs: the part of an item that goes on is sent first, then the block may wait for the
// first item's.
template <typename Config>
__device__ __forceinline__ void join_block(const AttentionParams& p, const ColumnShape& shape,
                                           const BlockPlan& plan, const AttentionWorkspace& ws,
                                           const BlockMemory<Config>& memory) {
  __shared__ uint8_t* members[2 * 16];  // pieces of the item at hand, in order
  __shared__ float2 totals[Config::kColumns];
  float* factors = reinterpret_cast<float*>(memory.ring(0) + Config::kPartialBytes);
  const int lane = threadIdx.x % 32, block = blockIdx.x;
  const PieceNote own = lane < 2 * memory.warps ? memory.pieces()[lane] : PieceNote{};
  const auto part_of = [&](int sender) {
    return Partial<Config>{ws.sent_parts + static_cast<int64_t>(sender) * Config::kPartialBytes};
  };
  uint32_t waiting = __ballot_sync(~0u, own.base >= 0);
#pragma unroll 1
  while (waiting != 0) {
    const PieceNote note = memory.pieces()[31 - __clz(waiting)];
    const uint32_t matching = __ballot_sync(~0u, own.base == note.base);
    waiting &= ~matching;
    if (threadIdx.x < 32 && (matching >> lane & 1)) {
      members[__popc(matching & ((1u << lane) - 1))] =
          lane % 2 ? memory.ring(lane / 2)
                   : ws.head_parts + (static_cast<int64_t>(block) * memory.warps + lane / 2) *
                                         Config::kPartialBytes;
    }
    const bool ends = note.last < plan.end;
    const int first_block = ends && note.base < plan.begin ? plan.all.block_of(note.base) : block;
    __syncthreads();
    join_pieces<Config>(
        __popc(matching), block - first_block, [&](int i) { return Partial<Config>{members[i]}; },
        [&](int i) { return part_of(first_block + i); }, factors, totals,
        [&]() {
          if (threadIdx.x >= Config::kColumns) return;
          const float2 column = totals[threadIdx.x];
          if (!ends) {
            send(part_of(block).columns() + threadIdx.x, column);
          } else {
            const int64_t row = column_row<Config>(p, shape, note.item, threadIdx.x);
            if (row >= 0) write_lse(p, row, column.x, column.y);
          }
        },
        [&](int pair, float2 total) {
          if (ends) {
            write_output<Config>(p, shape, note.item, pair, total, totals);
          } else {
            send(part_of(block).pairs() + pair, total);
          }
        });
    if (waiting != 0) __syncthreads();
  }
}

// A warp's share, from its first entry to the piece it leaves for the join.
template <typename Config>
__device__ __forceinline__ void work(const AttentionParams& p, const ColumnShape& shape,
                                     const AttentionWorkspace& ws,
                                     const BlockMemory<Config>& memory, EntryRing<Config>& ring,
                                     const EntryCursor& begin, int unsettled_pages, int lane,
                                     int warp) {
  AttentionState<Config> state;
  const SpanOffsets offsets = span_offsets<Config>(lane);
  constexpr int kSpans = kPageTokens / Config::kSpanTokens;
  int entries_left = 0, done_runs = 0;
  bool exact = false, open = false, fetched = false, from_codes = false, whole = false;
  const auto run = [&]() { return ring.notes + (done_runs - 1) % kRunNotes; };
  ring.live = begin.live;
  if (begin.live) ring.begin_run(p, shape, begin, lane);
#if OSCAR_BULK_COPIES
  if (unsettled_pages >= 0) {
    // What the kernel ahead cannot be writing. One page: more would hold up the loads of the
    // queries, which come after.
    if (!Config::kPagedBf16 && ring.left > 0 && !ring.exact &&
        begin.entry < begin.shape.history_entries - unsettled_pages) {
      ring.fill_page(p, lane);
    }
    ptx::wait_for_previous();
    ptx::launch_next();  // which may count on it that all before this launch is done
  }
#endif
#pragma unroll 1
  while (true) {
    if (!Config::kPagedBf16 && !open && !fetched &&
        (ring.pending > 0 || ring.left > 0 || ring.live)) {
      // Before the copies of the first pages, which would hold these loads up.
      fetched = true;
      fetch_code_queries<Config>(state, query_row<Config>(p, shape, ring.item_of(done_runs), lane),
                                 lane);
    }
    ring.fill(p, shape, lane);
    if (entries_left == 0) {
      if (ring.pending == 0) break;
      ++done_runs;
      entries_left = run()->entries;
      exact = Config::kPagedBf16 || run()->exact;
      if (!open) {
        open = true;
        whole = run()->starts;
        from_codes = false;
        state.clear();
      }
      if (exact) {
        if constexpr (!Config::kPagedBf16) {
          if (from_codes) settle_accumulator<Config>(state, lane);
        }
        from_codes = false;
        load_exact_queries<Config>(state, query_row<Config>(p, shape, run()->item, lane), lane);
      } else if (!from_codes) {
        from_codes = true;
        if constexpr (!Config::kPagedBf16) {
          convert_code_queries<Config>(state, p.sm_scale, lane);
        }
      }
      fetched = false;
    }
    uint8_t* slot = ring.wait();
    --entries_left;
    if (exact) {
      const int valid = entries_left == 0 ? run()->last_valid : kExactTile;
      if (valid > 0) {
        if (valid < kExactTile) clear_absent_rows<Config>(slot, valid, lane);
        int query_of[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 2 * (lane % 4) + c;
          const int at = run()->item.column_tile * Config::kColumns + column;
          query_of[c] =
              column < Config::kColumns && at < shape.columns ? shape.query(at) : -(1 << 30);
        }
        const int tile = run()->entries - 1 - entries_left;
        exact_tile<Config>(state, slot, valid, run()->distance + tile * kExactTile, query_of,
                           p.sm_scale * kLog2E, lane);
      }
    } else if constexpr (!Config::kPagedBf16) {
      int valid = entries_left == 0 ? run()->last_valid : kPageTokens;
      SpanValues<Config> values;
      if (valid < kPageTokens) {
        clear_absent_metadata<Config>(slot, valid, lane);
#pragma unroll 1
        for (int span = 0; valid > 0; ++span, valid -= Config::kSpanTokens) {
          weigh_span<Config, true>(state, slot, span, offsets, valid, lane, values, []() {});
          add_values<Config>(state, values);
        }
      } else {
        const int turns = ring.turns(entries_left);
        weigh_span<Config, false>(state, slot, 0, offsets, valid, lane, values, []() {});
#pragma unroll 1
        for (int turn = 0, span = 1;; ++span) {
          if (span == kSpans) {
            if (turn == turns) break;
            slot = ring.turn(p, turn++, lane);
            span = 0;
          }
          weigh_span<Config, false>(state, slot, span, offsets, valid, lane, values,
                                    [&]() { add_values<Config>(state, values); });
        }
        add_values<Config>(state, values);
        ring.turned(turns);
        entries_left -= turns;
      }
    }
    ring.release();
    if (entries_left > 0 || !run()->closes) continue;
    open = false;
    if constexpr (!Config::kPagedBf16) {
      if (from_codes) settle_accumulator<Config>(state, lane);
    }
    state.sum[0] = sum_over_rows<Config>(state.sum[0]);
    state.sum[1] = sum_over_rows<Config>(state.sum[1]);
    if (whole && run()->ends) {
      write_item<Config>(p, shape, state, run()->item, lane);
      continue;
    }
    const bool tail = ring.pending == 0 && ring.left == 0 && !ring.live;
    uint8_t* to = tail ? ring.slots  // free only at the share's end
                       : ws.head_parts + (static_cast<int64_t>(blockIdx.x) * memory.warps + warp) *
                                             Config::kPartialBytes;
    store_partial<Config>(state, {to}, lane);
    if (lane == 0) memory.pieces()[2 * warp + tail] = {run()->base, run()->last, run()->item};
  }
}

// Where this warp begins. Every warp plans for itself where every item has blocks of its own, else
// the first one for all, or all warps together, and then the block synchronises.
template <typename Config>
__device__ __forceinline__ EntryCursor plan_block(const AttentionParams& p,
                                                  const ColumnShape& shape,
                                                  const PlanShape& plan_shape,
                                                  const BlockMemory<Config>& memory,
                                                  BlockPlan& plan, int lane, int warp) {
  constexpr EntryWeights kWeights = Config::kWeights;
  constexpr bool kBf16 = Config::kPagedBf16;
  const int block = blockIdx.x, items_per_request = plan_shape.items_per_request.d;
  if (lane < 2) memory.pieces()[2 * warp + lane] = PieceNote{};
  if (plan_shape.blocks_per_item.d > 0 && p.batch <= 32) {
    const int own = lane < p.batch ? kWeights.item(request_shape<kBf16>(p, lane)) : 0;
    const int first = __shfl_sync(~0u, own, 0);
    const WorkPlan all = aligned_plan(first, p.batch * items_per_request, plan_shape, kWeights);
    if (all.blocks > 0 && __all_sync(~0u, lane >= p.batch || own == first)) {
      const int item = quotient(block, plan_shape.blocks_per_item);
      const int in_item = block - item * all.block_count;
      const int begin = item * first + in_item * all.share + min(in_item, all.longer);
      const int end = begin + all.share + (in_item < all.longer);
      if (threadIdx.x == 0) plan = {all, begin, end};
      const WarpShare share = block < all.blocks ? warp_share(begin, end, warp, plan_shape.warps)
                                                 : WarpShare{begin, begin};
      return aligned_cursor<kBf16>(p, kWeights, plan_shape, shape.column_tiles, first, item, share);
    }
  }
  int total = 0;
  if (p.batch > 32) {
    total = weigh_requests<kBf16, false>(p, kWeights, items_per_request, memory.prefix());
  }
  if (warp == 0) {  // lane w begins the share of warp w
    if (p.batch <= 32) {
      total = weigh_requests<kBf16, true>(p, kWeights, items_per_request, memory.prefix());
    }
    const WorkPlan all = plan_of(total, kWeights);
    const int begin = all.block_begin(block), end = all.block_begin(block + 1);
    if (lane == 0) plan = {all, begin, end};
    if (lane < memory.warps) {
      const WarpShare share = block < all.blocks ? warp_share(begin, end, lane, plan_shape.warps)
                                                 : WarpShare{begin, begin};
      memory.cold(lane)->cursor = cursor_begin<kBf16>(p, kWeights, memory.prefix(),
                                                      shape.column_tiles, share.first, share.end);
    }
  }
  __syncthreads();
  return memory.cold(warp)->cursor;
}

template <typename Config>
__global__ void __launch_bounds__(Config::kMaxWarps * 32, 1)
    decode_attention_kernel(const __grid_constant__ AttentionParams p,
                            const __grid_constant__ ColumnShape shape,
                            const __grid_constant__ PlanShape plan_shape,
                            const __grid_constant__ AttentionWorkspace ws, int unsettled_pages) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ BlockPlan plan;
  const int lane = threadIdx.x % 32;
  int warp = threadIdx.x / 32;
  asm volatile("" : "+r"(warp));  // else it is worked out again for every page
  const BlockMemory<Config> memory{shared, static_cast<int>(blockDim.x / 32)};
  EntryRing<Config> ring;
  ring.slots = memory.ring(warp);
  ring.notes = memory.notes(warp);
  ring.barriers = memory.barriers(warp);
  ring.cold = memory.cold(warp);
#if OSCAR_BULK_COPIES
  if (lane == 0) {
    for (int s = 0; s < Config::kSlots; ++s) {
      ptx::barrier_init(ptx::shared_address(ring.barriers + s), 1);
    }
    ptx::barrier_fence_init();
  }
  if (unsettled_pages < 0) {
    ptx::wait_for_previous();
    ptx::launch_next();
  }
#endif
  const EntryCursor begin = plan_block<Config>(p, shape, plan_shape, memory, plan, lane, warp);
  __syncwarp();  // all lanes have read their cursor
  work<Config>(p, shape, ws, memory, ring, begin, unsettled_pages, lane, warp);
  __syncthreads();
  join_block<Config>(p, shape, plan, ws, memory);
}

}  // namespace oscar
