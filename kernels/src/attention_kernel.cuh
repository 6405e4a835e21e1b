// Paged decode attention: persistent warps over equal shares of the cache's bytes, one launch.
#pragma once

#include "attention_merge.cuh"
#include "entry_ring.cuh"
#include "exact_tile.cuh"
#include "int2_tile.cuh"

namespace oscar {

// Parts of the caller's workspace.
struct AttentionWorkspace {
  int* arrivals;         // [blocks] zero before and after every launch
  uint8_t* head_parts;   // [blocks][warps] partials of items that ended inside a warp's share
  uint8_t* block_parts;  // [blocks][2] partials of items shared with other blocks
};

// Shared memory of a block: warps' rings and scratch, then notes, barriers and the plan.
template <typename Config>
struct BlockMemory {
  uint8_t* base;
  int warps;
  __device__ uint8_t* ring(int warp) const {
    return base + warp * (Config::kSlots * Config::kSlotBytes);
  }
  __device__ uint8_t* scratch(int warp) const {
    return base + warps * (Config::kSlots * Config::kSlotBytes) + warp * Config::kScratchBytes;
  }
  __device__ uint8_t* held(int warp) const {
    return base + warps * (Config::kWarpBytes - Config::kHeldBytes) + warp * Config::kHeldBytes;
  }
  __device__ SlotNote* notes(int warp) const {
    return reinterpret_cast<SlotNote*>(base + warps * Config::kWarpBytes) + warp * Config::kSlots;
  }
  __device__ uint64_t* barriers(int warp) const {
    return reinterpret_cast<uint64_t*>(cold(warps)) + warp * Config::kSlots;
  }
  __device__ ColdCursor* cold(int warp) const {
    return reinterpret_cast<ColdCursor*>(notes(warps)) + warp;
  }
  __device__ PieceNote* pieces() const {  // [2 * warps]: head, then tail, of each warp
    return reinterpret_cast<PieceNote*>(barriers(warps));
  }
  __device__ int* prefix() const { return reinterpret_cast<int*>(pieces() + 2 * warps); }
  static size_t bytes(int warps, int batch) {
    return static_cast<size_t>(warps) *
               (Config::kWarpBytes + Config::kSlots * (sizeof(SlotNote) + 8) + sizeof(ColdCursor) +
                2 * sizeof(PieceNote)) +
           sizeof(int) * (batch + 1);
  }
};

// Joins the pieces that the block's warps left behind. All threads take part.
template <typename Config>
__device__ inline void join_block(const AttentionParams& p, const WorkPlan& plan,
                                  const EntryWeights& weights, int column_tiles,
                                  const AttentionWorkspace& ws, const BlockMemory<Config>& memory) {
  constexpr int kHalves = 2 * Config::kPartialFragments;
  __shared__ int last_arrival;
  __shared__ uint8_t* members[2 * 16];  // partials of the item at hand, in order
  __shared__ float2 totals[Config::kColumns];
  float* factors = reinterpret_cast<float*>(memory.scratch(0));  // the warps are done with it
  const int pieces = 2 * memory.warps, items = p.num_kv_heads * column_tiles;
  const int begin = plan.block_begin(blockIdx.x), end = plan.block_begin(blockIdx.x + 1);
  const auto block_partial = [&](int block, bool starts) {
    uint8_t* at =
        ws.block_parts + (static_cast<int64_t>(block) * 2 + starts) * Config::kPartialBytes;
    return Partial<Config>{reinterpret_cast<float4*>(at)};
  };
  const int lane = threadIdx.x % 32;
  const PieceNote my_note = lane < pieces ? memory.pieces()[lane] : PieceNote{};
  uint32_t waiting = __ballot_sync(~0u, my_note.b >= 0);
  while (waiting != 0) {
    // The item's pieces in this block, in order.
    PieceNote note;
    const int leader = __ffs(waiting) - 1;
    note.b = __shfl_sync(~0u, my_note.b, leader);
    note.head = static_cast<uint16_t>(__shfl_sync(~0u, my_note.head, leader));
    note.column_tile = static_cast<uint16_t>(__shfl_sync(~0u, my_note.column_tile, leader));
    const uint32_t matching = __ballot_sync(~0u, my_note.same_item(note));
    const int count = __popc(matching);
    waiting &= ~matching;
    if (threadIdx.x < 32 && (matching >> lane & 1)) {
      members[__popc(matching & ((1u << lane) - 1))] =
          lane % 2 ? memory.ring(lane / 2)
                   : ws.head_parts + (static_cast<int64_t>(blockIdx.x) * memory.warps + lane / 2) *
                                         Config::kPartialBytes;
    }
    __syncthreads();
    const int weight = (plan.prefix[note.b + 1] - plan.prefix[note.b]) / items;
    const int item_begin =
        plan.prefix[note.b] + (note.head * column_tiles + note.column_tile) * weight;
    const RequestShape shape = request_shape<Config::kPagedBf16>(p, note.b);
    const int last_entry = item_begin + weights.offset(shape, max(1, shape.entries()) - 1);
    const int first_block = plan.block_of(item_begin);
    const int parts = plan.block_of(last_entry) - first_block + 1;
    const ColumnMap map = column_map<Config>(p, note.b, note.head, note.column_tile);
    const auto member = [&](int k) {
      return Partial<Config>{reinterpret_cast<float4*>(members[k])};
    };
    join_factors<Config, false>(count, member, factors, totals);
    bool finish = parts == 1;
    const Partial<Config> mine = block_partial(blockIdx.x, item_begin >= begin);
    for (int half = threadIdx.x; half < kHalves; half += blockDim.x) {
      const float2 total = join_half<Config, false>(half, count, member, factors);
      if (finish) {
        const int column = half_column<Config>(half);
        write_output<Config>(
            p, map, column, half_dim<Config>(half), total,
            {inverse_or_zero(totals[column].y), inverse_or_zero(totals[column + 1].y)});
      } else {
        mine.halves()[half] = total;
      }
    }
    if (!finish) {
      if (threadIdx.x < Config::kColumns) mine.columns()[threadIdx.x] = totals[threadIdx.x];
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        last_arrival = atomicAdd(ws.arrivals + first_block, 1) == parts - 1;
        if (last_arrival) ws.arrivals[first_block] = 0;  // ready for the next launch
        __threadfence();
      }
      __syncthreads();
      if (last_arrival) {
        const auto part = [&](int k) { return block_partial(first_block + k, k == 0); };
        join_factors<Config, true>(parts, part, factors, totals);
        for (int half = threadIdx.x; half < kHalves; half += blockDim.x) {
          const int column = half_column<Config>(half);
          write_output<Config>(
              p, map, column, half_dim<Config>(half),
              join_half<Config, true>(half, parts, part, factors),
              {inverse_or_zero(totals[column].y), inverse_or_zero(totals[column + 1].y)});
        }
        finish = true;
      }
    }
    if (finish && threadIdx.x < Config::kColumns) {
      write_lse<Config>(p, map, threadIdx.x, totals[threadIdx.x]);
    }
    __syncthreads();
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kMaxWarps * 32, 1)
    decode_attention_kernel(const __grid_constant__ AttentionParams p, int column_tiles,
                            const __grid_constant__ AttentionWorkspace ws) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const BlockMemory<Config> memory{shared, warps};
  const EntryWeights weights{Config::kHistoryWeight, Config::kExactWeight};
  const int items = p.num_kv_heads * column_tiles;
  EntryRing<Config> ring;
  ring.slots = memory.ring(warp);
  ring.notes = memory.notes(warp);
  ring.barriers = memory.barriers(warp);
  uint64_t policy = 0;
#if OSCAR_BULK_COPIES
  policy = ptx::evict_first_policy();
  if (lane == 0) {
    for (int s = 0; s < Config::kSlots; ++s) {
      ptx::barrier_init(ptx::shared_address(ring.barriers + s), 1);
    }
    ptx::barrier_fence_init();
  }
  __syncwarp();
#endif
  const WorkPlan plan = make_plan<Config::kPagedBf16>(p, weights, items, memory.prefix());
  if (static_cast<int>(blockIdx.x) >= plan.blocks) return;
  const int begin = plan.block_begin(blockIdx.x), end = plan.block_begin(blockIdx.x + 1);
  const int warp_share = (end - begin) / warps, longer = (end - begin) % warps;
  const auto share = [&](int w) { return begin + w * warp_share + min(w, longer); };
  ring.cold = memory.cold(warp);
  {
    ColdCursor first;
    first.cursor = cursor_begin<Config::kPagedBf16>(p, plan, weights, column_tiles, share(warp),
                                                    share(warp + 1));
    ring.live = first.cursor.live;
    if (lane == 0) *ring.cold = first;
    __syncwarp();
  }
  if (lane < 2) memory.pieces()[2 * warp + lane] = PieceNote{};
  AttentionState<Config> state;
  uint8_t* scratch = memory.scratch(warp);
  auto* held = reinterpret_cast<ExactWeights<Config>*>(memory.held(warp)) + lane;
  bool open = false, from_codes = false, piece_started = false, queries_staged = false;

  SlotNote note;  // of the open piece; kind and valid of the slot at hand
  while (true) {
    ring.refill(p, weights, column_tiles, lane, policy);
    if (!ring.pending()) break;
    bool released = false, opened = false;
    if (ring.front_is_plain()) {
      note.kind = SlotKind::kPage;
      note.valid = kPageTokens;
      note.ended = false;
    } else {
      note = ring.front_note();
      if (!open) {  // while the first copy is on its way
        open = opened = true;
        piece_started = note.started;
        from_codes = note.kind == SlotKind::kPage;
        state.clear();
        const ColumnMap map = column_map<Config>(p, note.b, note.head, note.column_tile);
        stage_queries<Config>(p, map, scratch, lane);
        queries_staged = true;
        if constexpr (!Config::kPagedBf16) {
          if (from_codes) load_query_operands<Config>(state, scratch, p.sm_scale, lane);
        }
      }
    }
    const uint8_t* slot = ring.wait();
    if constexpr (!Config::kPagedBf16) {
      // A first guess from a few tokens saves computing most tiles twice.
      if (opened && from_codes) {
        raise_references<Config, true>(state, slot, 0, 16, note.valid, lane);
      }
    }
    if (!Config::kPagedBf16 && note.kind == SlotKind::kPage) {
      if constexpr (!Config::kPagedBf16) {
        if (note.valid == kPageTokens) {
          while (true) {  // runs of plain pages stay in this loop
            full_page<Config>(state, slot, lane);
            if (note.ended) break;
            ring.release();
            released = true;
            if (!ring.refill_plain(p, lane, policy) || !ring.front_is_plain()) break;
            slot = ring.wait();
            released = false;
          }
        } else {
          partial_page<Config>(state, slot, note.valid, lane);
        }
      }
    } else if (note.kind == SlotKind::kExactKeys) {
      if (from_codes) {
        settle_accumulator<Config>(state, scratch, lane);
        from_codes = false;
        queries_staged = false;
      }
      const ColumnMap map = column_map<Config>(p, note.b, note.head, note.column_tile);
      if (!queries_staged) {
        stage_queries<Config>(p, map, scratch, lane);
        queries_staged = true;
      }
      if (note.valid > 0) {
        int query_of[Config::kNT][2];
#pragma unroll
        for (int n = 0; n < Config::kNT; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int column = 8 * n + 2 * (lane % 4) + c;
            query_of[n][c] =
                map.row(column) < 0 ? -(1 << 30) : map.query(map.first_column + column);
          }
        }
        ExactWeights<Config> tile_weights;
        exact_keys<Config>(state, slot, scratch, note.valid, note.distance, query_of,
                           p.sm_scale * kLog2E, lane, tile_weights);
        *held = tile_weights;
      }
    } else if (note.valid > 0) {
      const ExactWeights<Config> tile_weights = *held;
      exact_values<Config>(state, slot, lane, tile_weights);
    }
    if (!released) ring.release();
    const bool share_ends = ring.done();
    const bool item_ends = note.ended && note.kind != SlotKind::kExactKeys;
    if (!item_ends && !share_ends) continue;
    open = false;
    if (from_codes) settle_accumulator<Config>(state, scratch, lane);
#pragma unroll
    for (int n = 0; n < Config::kNT; ++n) {
      state.sum[n][0] = sum_over_rows(state.sum[n][0]);
      state.sum[n][1] = sum_over_rows(state.sum[n][1]);
    }
    const ColumnMap map = column_map<Config>(p, note.b, note.head, note.column_tile);
    if (piece_started && item_ends) {  // the whole item was mine
#pragma unroll
      for (int n = 0; n < Config::kNT; ++n) {
        const int column = 8 * n + 2 * (lane % 4);
        const float2 inverse = {inverse_or_zero(state.sum[n][0]), inverse_or_zero(state.sum[n][1])};
#pragma unroll
        for (int m = 0; m < Config::kTiles; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            write_output<Config>(p, map, column, 16 * m + lane / 4 + 8 * h,
                                 {state.out[n][m][2 * h], state.out[n][m][2 * h + 1]}, inverse);
          }
        }
        if (lane < 4) {
          write_lse<Config>(p, map, column, {state.reference[n][0], state.sum[n][0]});
          write_lse<Config>(p, map, column + 1, {state.reference[n][1], state.sum[n][1]});
        }
      }
    } else {
      uint8_t* to = share_ends ? memory.ring(warp)  // free only at the share's end
                               : ws.head_parts + (static_cast<int64_t>(blockIdx.x) * warps + warp) *
                                                     Config::kPartialBytes;
      store_partial<Config>(state, {reinterpret_cast<float4*>(to)}, lane);
      if (lane == 0) {
        memory.pieces()[2 * warp + share_ends] = PieceNote{note.b, note.head, note.column_tile};
      }
    }
  }
  __syncthreads();
  join_block<Config>(p, plan, weights, column_tiles, ws, memory);
}

}  // namespace oscar
