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
  uint8_t* block_parts;  // [blocks][2] joined parts of items shared with other blocks
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

// Joins the pieces that the block's warps left behind. All threads take part.
template <typename Config>
__device__ __forceinline__ void join_block(const AttentionParams& p, const ColumnShape& shape,
                                           const WorkPlan& plan, const AttentionWorkspace& ws,
                                           const BlockMemory<Config>& memory) {
  constexpr int kCopies = Config::kCopies;
  __shared__ int last_arrival;
  __shared__ uint8_t* members[2 * 16];  // partials of the item at hand, in order
  __shared__ float2 totals[Config::kColumns];
  float* factors = reinterpret_cast<float*>(memory.ring(0) + Config::kPartialBytes);
  const int lane = threadIdx.x % 32, begin = plan.block_begin(blockIdx.x);
  const PieceNote own = lane < 2 * memory.warps ? memory.pieces()[lane] : PieceNote{};
  const auto block_part = [&](int block, bool starts) {
    return Joined<Config>{ws.block_parts +
                          (static_cast<int64_t>(block) * 2 + starts) * Config::kJoinedBytes};
  };
  uint32_t waiting = __ballot_sync(~0u, own.base >= 0);
#pragma unroll 1
  while (waiting != 0) {
    const int leader = __ffs(waiting) - 1;
    const PieceNote note = memory.pieces()[leader];
    const uint32_t matching = __ballot_sync(~0u, own.base == note.base);
    const int count = __popc(matching) * kCopies;
    waiting &= ~matching;
    if (threadIdx.x < 32 && (matching >> lane & 1)) {
      members[__popc(matching & ((1u << lane) - 1))] =
          lane % 2 ? memory.ring(lane / 2)
                   : ws.head_parts + (static_cast<int64_t>(blockIdx.x) * memory.warps + lane / 2) *
                                         Config::kPartialBytes;
    }
    const int first_block = plan.block_of(note.base);
    const int parts = plan.block_of(note.last) - first_block + 1;
    __syncthreads();
    join_factors<Config>(
        count,
        [&](int part, int column) {
          const Partial<Config> from{members[part / kCopies]};
          return from.columns()[column + part % kCopies * Config::kColumns];
        },
        factors, totals);
    const Joined<Config> mine = block_part(blockIdx.x, note.base >= begin);
#pragma unroll 1
    for (int pair = threadIdx.x; pair < Config::kJoinedPairs; pair += blockDim.x) {
      float2 total = make_float2(0.0f, 0.0f);
      const float2* factor =
          reinterpret_cast<const float2*>(factors + Joined<Config>::column(pair));
#pragma unroll 4
      for (int part = 0; part < count / kCopies; ++part) {
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy) {
          const float2* from = reinterpret_cast<const float2*>(members[part]);
          add_scaled(total, from[Joined<Config>::in_partial(pair, copy)],
                     factor[(part * kCopies + copy) * (Config::kColumns / 2)]);
        }
      }
      if (parts == 1) {
        write_output<Config>(p, shape, note.item, pair, total, totals);
      } else {
        mine.pairs()[pair] = total;
      }
    }
    bool finish = parts == 1;
    if (!finish) {
      if (threadIdx.x < Config::kColumns) mine.columns()[threadIdx.x] = totals[threadIdx.x];
      __syncthreads();
      if (threadIdx.x == 0) {  // speaks for the block: the barriers carry the order on
        last_arrival = ptx::arrive_and_count(ws.arrivals + first_block) == parts - 1;
        if (last_arrival) ws.arrivals[first_block] = 0;  // ready for the next launch
      }
      __syncthreads();
      finish = last_arrival;
      if (finish) {  // what other blocks wrote is read past this multiprocessor's L1 cache
        join_factors<Config>(
            parts,
            [&](int part, int column) {
              return __ldcg(&block_part(first_block + part, part == 0).columns()[column]);
            },
            factors, totals);
#pragma unroll 1
        for (int pair = threadIdx.x; pair < Config::kJoinedPairs; pair += blockDim.x) {
          float2 total = make_float2(0.0f, 0.0f);
          const float2* factor =
              reinterpret_cast<const float2*>(factors + Joined<Config>::column(pair));
#pragma unroll 8
          for (int part = 0; part < parts; ++part) {
            add_scaled(total, __ldcg(block_part(first_block + part, part == 0).pairs() + pair),
                       factor[part * (Config::kColumns / 2)]);
          }
          write_output<Config>(p, shape, note.item, pair, total, totals);
        }
      }
    }
    if (finish && threadIdx.x < Config::kColumns) {
      const int64_t row = column_row<Config>(p, shape, note.item, threadIdx.x);
      if (row >= 0) write_lse(p, row, totals[threadIdx.x].x, totals[threadIdx.x].y);
    }
    __syncthreads();
  }
}

// A warp's share, from its first entry to the piece it leaves for the join.
template <typename Config>
__device__ __forceinline__ void work(const AttentionParams& p, const ColumnShape& shape,
                                     const AttentionWorkspace& ws,
                                     const BlockMemory<Config>& memory, EntryRing<Config>& ring,
                                     int lane, int warp) {
  AttentionState<Config> state;
  const SpanOffsets offsets = span_offsets<Config>(lane);
  int entries_left = 0, done_runs = 0;
  bool exact = false, open = false, fetched = false, from_codes = false, whole = false;
  bool fresh = false;
  const auto run = [&]() { return ring.notes + (done_runs - 1) % kRunNotes; };
#pragma unroll 1
  while (true) {
    if (!Config::kPagedBf16 && !open && !fetched && (ring.pending > 0 || ring.live)) {
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
        from_codes = fresh = true;
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
      int valid = kPageTokens;
      if (entries_left == 0) {
        valid = run()->last_valid;
        if (valid < kPageTokens) clear_absent_metadata<Config>(slot, valid, lane);
      }
      while (true) {
        const uint8_t* codes = slot;
        const uint8_t* metadata = slot;
#pragma unroll 1
        for (int span = 0; span < kPageTokens / Config::kSpanTokens && valid > 0; ++span) {
          int2_span<Config>(state, codes, metadata, offsets, valid, fresh, lane);
          fresh = false;
          valid -= Config::kSpanTokens;
          codes += Config::kSpanTokens * Config::Layout::kRowBytes;
          metadata += Config::kSpanTokens * Config::kMetadataRow;
        }
        if (entries_left < 2 || !ring.steady()) break;
        slot = ring.turn(p, lane);
        --entries_left;
        valid = kPageTokens;
      }
    }
    ring.release();
    if (entries_left > 0 || !run()->closes) continue;
    open = false;
    if constexpr (!Config::kPagedBf16) {
      if (from_codes) settle_accumulator<Config>(state, lane);
    }
    state.sum[0] = sum_over_rows(state.sum[0]);
    state.sum[1] = sum_over_rows(state.sum[1]);
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

template <typename Config>
__global__ void __launch_bounds__(Config::kMaxWarps * 32, 1)
    decode_attention_kernel(const __grid_constant__ AttentionParams p,
                            const __grid_constant__ ColumnShape shape,
                            const __grid_constant__ AttentionWorkspace ws) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ WorkPlan plan;
  constexpr EntryWeights kWeights = Config::kWeights;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const BlockMemory<Config> memory{shared, warps};
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
  ptx::launch_next();
  ptx::wait_for_previous();
#endif
  const int items = p.num_kv_heads * shape.column_tiles;
  int total = 0;
  bool equal = false;
  if (p.batch > 32) {
    total = weigh_requests<Config::kPagedBf16, false>(p, kWeights, items, memory.prefix(), equal);
  }
  if (warp == 0) {  // plans for all: lane w begins the share of warp w
    if (p.batch <= 32) {
      total = weigh_requests<Config::kPagedBf16, true>(p, kWeights, items, memory.prefix(), equal);
    }
    const WorkPlan whole = plan_of(total, equal ? items * p.batch : 0, kWeights);
    if (lane == 0) plan = whole;
    if (lane < 2 * warps) memory.pieces()[lane] = PieceNote{};
    if (lane < warps) {
      const int begin = whole.block_begin(blockIdx.x), end = whole.block_begin(blockIdx.x + 1);
      const int share = (end - begin) / warps, longer = (end - begin) % warps;
      const int first = begin + lane * share + min(lane, longer);
      const bool works = static_cast<int>(blockIdx.x) < whole.blocks;
      memory.cold(lane)->cursor =
          cursor_begin<Config::kPagedBf16>(p, kWeights, memory.prefix(), shape.column_tiles, first,
                                           works ? first + share + (lane < longer) : first);
    }
  }
  __syncthreads();
  if (static_cast<int>(blockIdx.x) >= plan.blocks) return;
  ring.live = ring.cold->cursor.live;
  work<Config>(p, shape, ws, memory, ring, lane, warp);
  __syncthreads();
  join_block<Config>(p, shape, plan, ws, memory);
}

}  // namespace oscar
