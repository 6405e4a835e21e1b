// Joins the pieces of a block's warps, and the parts of an item that other blocks have sent.
#pragma once

#include "attention_merge.cuh"
#include "entry_ring.cuh"

namespace oscar {

// Parts of the caller's workspace.
struct AttentionWorkspace {
  uint8_t* sent_parts;  // [blocks] of items that go on in later blocks; zero between launches
  uint8_t* head_parts;  // [blocks][warps] pieces of items that ended inside a warp's share, or
                        // null: they fit in shared memory
};

// The whole plan and this block's share.
struct BlockPlan {
  WorkPlan all;
  int begin, end;
};

// Shared memory of a block: warps' rings, then, where there is room, the pieces of items that ended
// inside their shares, then their notes and barriers, then the plan, then, if
// keys have centers, what they add to logits.
template <typename Config>
struct BlockMemory {
  uint8_t* base;
  int warps;
  AttentionWorkspace ws;
  __device__ uint8_t* ring(int warp) const { return base + warp * Config::kRingBytes; }
  __device__ uint8_t* head_part(int warp) const {
    if (!ws.head_parts) return ring(warps) + warp * Config::kPartialBytes;
    return ws.head_parts +
           (static_cast<int64_t>(blockIdx.x) * warps + warp) * Config::kPartialBytes;
  }
  __device__ uint8_t* piece(int lane) const {  // 2 w: head of warp w, 2 w + 1: its tail
    return lane % 2 ? ring(lane / 2) : head_part(lane / 2);
  }
  __device__ RunNote* notes(int warp) const {
    return reinterpret_cast<RunNote*>(ring(warps) +
                                      (ws.head_parts ? 0 : warps * Config::kPartialBytes)) +
           warp * kRunNotes;
  }
  __device__ ColdCursor* cold(int warp) const {
    return reinterpret_cast<ColdCursor*>(notes(warps)) + warp;
  }
  __device__ PieceNote* pieces() const {  // [2 * warps]: head, then tail, of each warp
    return reinterpret_cast<PieceNote*>(cold(warps));
  }
  __device__ uint64_t* barriers(int warp) const {
    return reinterpret_cast<uint64_t*>(pieces() + 2 * warps) + warp * Config::kStages;
  }
  __device__ int* prefix() const { return reinterpret_cast<int*>(barriers(warps)); }
  // [kCenterBlock][4] of each warp: see ColdCursor::center_logits.
  __device__ float4* center_logits(int warp, int batch) const {
    int* end = prefix() + batch + 1;
    end += (0 - ptx::shared_address(end)) % 16 / 4;
    return reinterpret_cast<float4*>(end) + warp * kCenterBlock * 4;
  }
  static size_t bytes(int warps, int batch, bool with_heads, bool with_centers) {
    return static_cast<size_t>(warps) *
               (Config::kRingBytes + (with_heads ? Config::kPartialBytes : 0) +
                kRunNotes * sizeof(RunNote) + sizeof(ColdCursor) + 2 * sizeof(PieceNote) +
                Config::kStages * sizeof(uint64_t)) +
           sizeof(int) * (batch + 1) +
           (with_centers ? 16 + warps * kCenterBlock * 4 * sizeof(float4) : 0);
  }
};

// What the join keeps in shared memory beside the pieces.
template <typename Config>
struct JoinMemory {
  uint8_t* members[2 * 16];  // all pieces in order
  // Of items, the last first: (reference, sum); once done, what finish_column returns.
  float2 totals[16 + 1][Config::kColumns];
  int first_block;  // where the first item begins
};

// All that the steps of the join share.
template <typename Config>
struct BlockJoin {
  static constexpr int kColumns = Config::kColumns;
  static constexpr int kStripes = Config::kPairs / 64;  // a lane has two pairs of columns
  const AttentionParams& p;
  const ColumnShape& shape;
  const BlockPlan& plan;
  const BlockMemory<Config>& memory;
  JoinMemory<Config>& own;
  BlockPieces pieces;
  int lane, warp;

  // Of pieces, later of parts: [..][column], what brings them to the reference of their item.
  __device__ float* factors() const {
    return reinterpret_cast<float*>(memory.ring(0) + Config::kPartialBytes);
  }
  __device__ const float2* factors_of(int pair) const {
    return reinterpret_cast<const float2*>(factors() + Partial<Config>::column(pair));
  }
  __device__ Partial<Config> part_of(int sender) const {
    return {memory.ws.sent_parts + static_cast<int64_t>(sender) * Config::kPartialBytes};
  }
  __device__ bool goes_on(const PieceNote& note) const { return note.last >= plan.end; }
  // Whether blocks before this one send parts of an item that ends here: the first one, if any.
  __device__ bool waits(const PieceNote& note) const {
    return note.base < plan.begin && note.last < plan.end;
  }

  // Factors of all pieces and totals of all items; columns of the item that goes on are sent.
  __device__ __forceinline__ void join_columns() {
    const PieceNote* notes = memory.pieces();
    const Partial<Config> piece{memory.piece(min(lane, 2 * memory.warps - 1))};
    const int rank = pieces.rank(lane);
    if (warp == 0 && pieces.valid >> lane & 1) own.members[rank] = piece.bytes;
#pragma unroll 1
    for (int job = warp; job < pieces.items() * kColumns; job += memory.warps) {
      const int from_last = job / kColumns, column = job % kColumns;
      uint32_t lanes;
      const int first = pieces.first(from_last, lanes);
      float2 value = make_float2(kNoReference, 0.0f);
      const bool in = lanes >> lane & 1;
      if (in) value = piece.columns()[column];
      const float reference = largest_of_warp(value.x);
      const float factor = ptx::exp2_approx(value.x - reference);
      if (in) factors()[rank * kColumns + column] = factor;
      float2 total = make_float2(reference, sum_of_warp(value.y * factor));
      if (lane == 0) {
        const PieceNote note = notes[first];
        if (goes_on(note)) {
          send(part_of(blockIdx.x).columns() + column, total);
        } else if (!waits(note)) {
          total = finish_column<Config>(p, shape, note.item, column, total);
        }
        own.totals[from_last][column] = total;
      }
    }
  }

  // Sums of all items: sent, written, or kept for the parts that are waited for.
  __device__ __forceinline__ void join_pairs() {
#pragma unroll 1
    for (int job = warp; job < pieces.items() * kStripes; job += memory.warps) {
      const int from_last = job / kStripes, pair = job % kStripes * 64 + 2 * lane;
      uint32_t lanes;
      const int first = pieces.first(from_last, lanes), begin = pieces.rank(first);
      const int end = begin + __popc(lanes);
      const float2* factor = factors_of(pair);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int member = begin; member < end; member += 4) {
        float4 values[4];
        float2 scale[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = min(member + i, end - 1);
          values[i] = *Partial<Config>{own.members[at]}.two_pairs(pair);
          scale[i] = factor[at * (kColumns / 2)];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (member + i < end) add_scaled(sum, values[i], scale[i]);
        }
      }
      const PieceNote note = memory.pieces()[first];
      if (goes_on(note)) {
        send(part_of(blockIdx.x).two_pairs(pair), sum);
      } else if (waits(note)) {  // in place of the first piece's, which no other thread reads
        *Partial<Config>{own.members[begin]}.two_pairs(pair) = sum;
      } else {
        write_output<Config>(p, pair, sum, own.totals[from_last]);
      }
    }
  }

  // Waits for the columns of `blocks` parts; their factors, then this block's, and the totals.
  __device__ __forceinline__ void receive_columns(const ItemName& item, int blocks,
                                                  float2* columns) {
    // The last warps do it: the first ones wait for the pairs.
#pragma unroll 1
    for (int column = memory.warps - 1 - warp; column < kColumns; column += memory.warps) {
      float reference = kNoReference, sum = 0.0f;
#pragma unroll 1
      for (int base = 0; base <= blocks; base += 32) {
        const int part = base + lane;
        float2 value = make_float2(kNoReference, 0.0f);
        if (part < blocks) value = receive(part_of(own.first_block + part).columns() + column);
        if (part == blocks) value = columns[column];
        const float top = fmaxf(reference, largest_of_warp(value.x));
        sum = sum * ptx::exp2_approx(reference - top) + value.y * ptx::exp2_approx(value.x - top);
        reference = top;
        if (part <= blocks) factors()[part * kColumns + column] = value.x;
      }
#pragma unroll 1
      for (int part = lane; part <= blocks; part += 32) {
        float& factor = factors()[part * kColumns + column];
        factor = ptx::exp2_approx(factor - reference);
      }
      sum = sum_of_warp(sum);
      __syncwarp();  // this block's has been read
      if (lane == 0) {
        columns[column] =
            finish_column<Config>(p, shape, item, column, make_float2(reference, sum));
      }
    }
  }

  // Waits for the pairs of `blocks` parts and writes the item. Synchronises once.
  __device__ __forceinline__ void receive_pairs(int blocks, const float2* columns) {
    constexpr int kAtOnce = 8;  // parts whose words are on their way
    bool ready = false;         // factors and columns are
#pragma unroll 1
    for (int stripe = warp; stripe < kStripes || !ready; stripe += memory.warps) {
      const int pair = stripe * 64 + 2 * lane;
      const float2* factor = factors_of(pair);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
      for (int first = 0; first < blocks; first += kAtOnce) {
        uint8_t* const from =
            reinterpret_cast<uint8_t*>(part_of(own.first_block + first).two_pairs(pair));
        uint4 words[kAtOnce];
        bool all = stripe >= kStripes;
        while (!all) {
          all = true;
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            words[i] = make_uint4(1, 1, 1, 1);
            if (first + i < blocks) {
              words[i] = ptx::load_relaxed_4(from + i * Config::kPartialBytes);
            }
          }
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) all = all && was_sent(words[i]);
        }
        if (!ready) __syncthreads();
        ready = true;
        if (stripe >= kStripes) return;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i < blocks) {
            add_scaled(sum, received(words[i]), factor[(first + i) * (kColumns / 2)]);
            clear_sent(reinterpret_cast<float4*>(from + i * Config::kPartialBytes));
          }
        }
      }
      add_scaled(sum, *Partial<Config>{own.members[0]}.two_pairs(pair),
                 factor[blocks * (kColumns / 2)]);
      write_output<Config>(p, pair, sum, columns);
    }
  }
};

// Joins the pieces that the block's warps left behind: of all items together, first their factors,
// then their sums. All threads take part. What goes on in the next block is sent; the first item
// may have parts in blocks before this one, which are started no later and do not wait before they
// have sent theirs: its last block waits for them at the end.
template <typename Config>
__device__ __forceinline__ void join_block(const AttentionParams& p, const ColumnShape& shape,
                                           const BlockPlan& plan,
                                           const BlockMemory<Config>& memory) {
  __shared__ JoinMemory<Config> own;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const BlockPieces pieces =
      block_pieces(lane < 2 * memory.warps ? memory.pieces()[lane].base : -1, lane);
  if (pieces.valid == 0) return;
  BlockJoin<Config> join{p, shape, plan, memory, own, pieces, lane, warp};
  join.join_columns();
  const PieceNote note = memory.pieces()[__ffs(pieces.valid) - 1];
  if (threadIdx.x + 1 == blockDim.x && join.waits(note)) {
    own.first_block = plan.all.block_of(note.base);
  }
  __syncthreads();
  join.join_pairs();
  if (!join.waits(note)) return;
  const int blocks = blockIdx.x - own.first_block;
  float2* const columns = own.totals[pieces.items() - 1];
  __syncthreads();
  join.receive_columns(note.item, blocks, columns);
  join.receive_pairs(blocks, columns);
}

}  // namespace oscar
