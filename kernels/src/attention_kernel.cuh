// Paged decode attention: persistent warps over equal shares of the cache's bytes, one launch.
#pragma once

#include "attention_join.cuh"
#include "center_logits.cuh"
#include "exact_tile.cuh"
#include "int2_tile.cuh"

namespace oscar {

// A warp's share, from its first entry to the piece it leaves for the join.
template <typename Config>
__device__ __forceinline__ void work(const AttentionParams& p, const ColumnShape& shape,
                                     const BlockMemory<Config>& memory, EntryRing<Config>& ring,
                                     const EntryCursor& begin, int unsettled_pages, int lane,
                                     int warp) {
  AttentionState<Config> state;
  state.center_logits = ring.cold->center_logits + lane % 4;
  const SpanOffsets offsets = span_offsets<Config>(lane);
  constexpr int kSpans = kPageTokens / Config::kSpanTokens;
  int entries_left = 0, done_runs = 0;
  int most = 1;  // stages to fill: all warps' first pages come before any's second
  bool open = false;
  const auto run = [&]() { return ring.notes + (done_runs - 1) % kRunNotes; };
  const auto exact = [&]() { return Config::kPagedBf16 || run()->exact; };
  const auto center_block = [&]() { return memory.center_logits(warp, p.batch); };
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
    if (!Config::kPagedBf16 && !open && (ring.pending > 0 || ring.left > 0 || ring.live)) {
      // Before the copies of the first pages, which would hold these loads up. The run has begun:
      // the ring was filled before the last entry of the one ahead was used.
      const RunNote& next = ring.notes[done_runs % kRunNotes];
      fetch_code_queries<Config>(state, query_row<Config>(p, shape, next.item, lane), lane);
      prefetch_centers<Config>(p, next, lane);
    }
    ring.fill(p, shape, most, lane);
    if (entries_left == 0) {
      if (ring.pending == 0) break;
      const bool from_codes = open && !exact();  // what the run before has left
      ++done_runs;
      entries_left = run()->entries;
      if (!open) {
        open = true;
        __syncwarp();  // all lanes have read that of the piece before
        if (lane == 0) ring.cold->whole = run()->starts;
        if constexpr (!Config::kPagedBf16) {
          if (!exact()) {
            begin_centers<Config>(state, p, *run(), ring.cold, center_block(), lane);
            convert_code_queries<Config>(state, p.sm_scale, lane);
          }
        }
        state.clear();
      }
      if (exact()) {
        if constexpr (!Config::kPagedBf16) {
          if (from_codes) settle_accumulator<Config>(state, lane);
        }
        load_exact_queries<Config>(state, query_row<Config>(p, shape, run()->item, lane), lane);
      }
    }
    if (most < Config::kStages) {
      most = Config::kStages;
      continue;
    }
    uint8_t* stage = ring.wait();
    --entries_left;
    if (exact()) {
      const int valid = entries_left == 0 ? run()->last_valid : kExactTile;
      if (valid > 0) {
        if (valid < kExactTile) clear_absent_rows<Config>(stage, valid, lane);
        int query_of[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 2 * (lane % 4) + c;
          const int at = run()->item.column_tile * Config::kColumns + column;
          query_of[c] =
              column < Config::kColumns && at < shape.columns ? shape.query(at) : -(1 << 30);
        }
        const int tile = run()->entries - 1 - entries_left;
        exact_tile<Config>(state, stage, valid, run()->distance + tile * kExactTile, query_of,
                           p.sm_scale * kLog2E, lane);
      }
    } else if constexpr (!Config::kPagedBf16) {
      int valid = entries_left == 0 ? run()->last_valid : kPageTokens;
      const int page = run()->first_page + run()->entries - 1 - entries_left;
      if (page >= ring.cold->block_end) {
        next_center_block<Config>(p, *run(), query_row<Config>(p, shape, run()->item, lane),
                                  ring.cold, center_block(), lane);
      } else if (page >= ring.cold->center_end) {
        next_centers(p, ring.cold, center_block(), lane);
      }
      SpanValues<Config> values;
      if (valid < kPageTokens) {
        clear_absent_metadata<Config>(stage, valid, lane);
#pragma unroll 1
        for (int span = 0; valid > 0; ++span, valid -= Config::kSpanTokens) {
          weigh_span<Config, true>(state, stage, span, offsets, valid, lane, values, []() {});
          add_values<Config>(state, values);
        }
      } else {
        const int turns = min(ring.turns(entries_left), ring.cold->block_end - 1 - page);
        int stop = min(turns, ring.cold->center_end - 1 - page);
        weigh_span<Config, false>(state, stage, 0, offsets, valid, lane, values, []() {});
#pragma unroll 1
        for (int turn = 0, span = 1;; ++span) {
          if (span == kSpans) {
            if (turn == stop) {
              if (turn == turns) break;
              next_centers(p, ring.cold, center_block(), lane);
              stop = min(turns, ring.cold->center_end - 1 - page);
            }
            stage = ring.turn(p, turn++, lane);
            span = 0;
          }
          weigh_span<Config, false>(state, stage, span, offsets, valid, lane, values,
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
      if (!exact()) settle_accumulator<Config>(state, lane);
    }
    state.sum[0] = sum_over_rows<Config>(state.sum[0]);
    state.sum[1] = sum_over_rows<Config>(state.sum[1]);
    if (ring.cold->whole && run()->ends) {
      write_item<Config>(p, shape, state, run()->item, lane);
      continue;
    }
    const bool tail = ring.pending == 0 && ring.left == 0 && !ring.live;
    uint8_t* to = tail ? ring.stages : memory.head_part(warp);  // stages are free only at the end
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
    RequestShape request;
    if (lane < p.batch) request = request_shape<kBf16>(p, lane);
    const int own = kWeights.item(request);
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
      return aligned_cursor<kBf16>(p, kWeights, plan_shape, shape.column_tiles, first, item, share,
                                   request);
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
  const BlockMemory<Config> memory{shared, static_cast<int>(blockDim.x / 32), ws};
  EntryRing<Config> ring;
  ring.stages = memory.ring(warp);
  ring.notes = memory.notes(warp);
  ring.barriers = memory.barriers(warp);
  ring.cold = memory.cold(warp);
#if OSCAR_BULK_COPIES
  if (lane == 0) {
    for (int s = 0; s < Config::kStages; ++s) {
      ptx::barrier_init(ptx::shared_address(ring.barriers + s), 1);
    }
    ptx::barrier_fence_init();
  }
  if (unsettled_pages < 0) {
    // Brings the parameters that planning reads into the cache of constants.
    asm volatile("" ::"l"(p.history.history_len), "l"(p.history.pool), "r"(p.windows.sink_tokens),
                 "l"(p.seq_lens), "l"(p.q), "r"(p.batch), "r"(plan_shape.warps.d));
    ptx::wait_for_previous();
    ptx::launch_next();
  }
#endif
  const EntryCursor begin = plan_block<Config>(p, shape, plan_shape, memory, plan, lane, warp);
  __syncwarp();  // all lanes have read their cursor
  work<Config>(p, shape, memory, ring, begin, unsettled_pages, lane, warp);
  __syncthreads();
  join_block<Config>(p, shape, plan, memory);
}

}  // namespace oscar
