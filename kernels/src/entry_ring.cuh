// A warp's own ring of shared-memory stages, filled ahead of use; no barrier between warps.
//
// Hopper and later fill a stage with the bulk copy engine and wait on an mbarrier; older devices
// use cp.async groups. Entries come in runs: pages, or exact tiles, that follow each other in one
// item. The filling side is up to kStages entries, so up to kStages runs, ahead of the using side.
#pragma once

#include "attention_config.cuh"
#include "attention_piece.cuh"
#include "ptx.cuh"

namespace oscar {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define OSCAR_BULK_COPIES 1
#else
#define OSCAR_BULK_COPIES 0
#endif

// What the using side has to know of a run.
struct alignas(16) RunNote {
  int entries;
  int last_valid;          // tokens of the last entry; the others are full
  int distance;            // exact: first position of the run minus the position of query 0
  int first_page = 0;      // pages: of the run, in the request
  int piece_end = 0;       // pages: the first one behind the warp's, in the request
  int first_position = 0;  // pages: KeyCenters::first_position, where there are centers
  ItemName item;
  int base, last;  // weight before the item, and before its last entry
  bool exact;
  bool starts, ends;  // the item's first entry, its last
  bool closes;        // the warp's part of the item ends with this run
};

constexpr int kRunNotes = 4;  // a power of two, more than the runs under way

constexpr int kCenterBlock = 8;  // segments whose key centers' logits are worked out together

// The seldom-needed half of a warp's state, in shared memory: registers are short.
struct alignas(16) ColdCursor {
  EntryCursor cursor;       // first entry of the next run
  float4 center_logits[4];  // AttentionState has lane t's
  int first_segment;        // of those whose logits were worked out together
  int center_end;           // first page of the item's request for which center_logits do not hold
  int block_end;            // and the first one of none of these segments
  uint8_t in_block;         // which of them is the current one
  bool whole;               // the piece under way begins its item
};

template <typename Config>
struct EntryRing {
  static constexpr int kStages = Config::kStages;
  static_assert(kRunNotes > kStages, "");
  static constexpr int kFullTile = Config::kPagedBf16 ? kExactTile : kPageTokens;
  uint8_t* stages;     // kRingBytes
  uint64_t* barriers;  // [kStages]
  RunNote* notes;      // [kRunNotes]
  ColdCursor* cold;
  int filled = 0, used = 0;       // stages that come next
  int pending = 0;                // filled and not yet released
  uint32_t phase = 0;             // parity of the barriers, flips with each round of `used`
  int runs = 0;                   // begun by the filling side
  int left = 0;                   // entries of its run that are not yet issued
  bool exact = false;             // the run's kind
  bool live = false;              // the share has a run after it
  int at = 0;                     // pages: next of the run's; exact: next row of the window
  int page_id = 0;                // pages: of lane i, the run's page i
  const uint8_t* from = nullptr;  // pool, or rows of keys, at the item's KV head

  // Fills free stages, up to `most`. All lanes take part.
  __device__ __forceinline__ void fill(const AttentionParams& p, const ColumnShape& shape, int most,
                                       int lane) {
#pragma unroll 1
    while (pending < most) {
      if (left == 0) {
        if (!live) break;
        next_run(p, shape, lane);
      }
      if (Config::kPagedBf16 || exact) {
        issue_exact(p, lane);
        issued();
      } else {
        fill_page(p, lane);
      }
    }
  }

  // Fills a stage with the next page of the run that has begun.
  __device__ __forceinline__ void fill_page(const AttentionParams& p, int lane) {
    issue_page(p, filled, at++, lane);
    issued();
  }
  __device__ __forceinline__ void issued() {
#if !OSCAR_BULK_COPIES
    ptx::commit_copies();
#endif
    --left;
    ++pending;
    filled = filled + 1 == kStages ? 0 : filled + 1;
  }

  // Fills stage `stage` with page `at` of the run. All lanes take part.
  __device__ __forceinline__ void issue_page(const AttentionParams& p, int stage, int at,
                                             int lane) {
    const uint32_t page = __shfl_sync(~0u, page_id, at);
    const uint8_t* page_data =
        from +
        static_cast<uint64_t>(page) * static_cast<uint32_t>(p.num_kv_heads * Config::kPageBytes);
    const uint32_t to = ptx::shared_address(stages) + stage * Config::kStageBytes;
#if OSCAR_BULK_COPIES
    ptx::copy_bulk_by_one(to, page_data, Config::kPageBytes, ptx::shared_address(barriers + stage),
                          ptx::evict_first_policy());
#else
#pragma unroll 1
    for (int at = lane * 16; at < Config::kPageBytes; at += 512) {
      ptx::copy_16(to + at, page_data + at);
    }
#endif
  }

  // Keys and values of an exact tile: two runs of rows, each in two where the ring wraps.
  __device__ __forceinline__ void issue_exact(const AttentionParams& p, int lane) {
    constexpr int kRow = Config::kExactRow;
    const int rows = left == 1 ? notes[(runs - 1) % kRunNotes].last_valid : kExactTile;
    const uint8_t* keys = from;
    int first = rows, side_rows;  // rows before the wrap; rows from keys to values
    int64_t values_at;
    if (Config::kPagedBf16 && !exact) {
      const int64_t page = __shfl_sync(~0u, page_id, at / (kPageTokens / kExactTile));
      keys +=
          (page * p.num_kv_heads * 2 * kPageTokens + at % (kPageTokens / kExactTile) * kExactTile) *
          kRow;
      ++at;
      values_at = kPageTokens * kRow;
      side_rows = 0;
    } else {
      const int end = p.windows.sink_tokens + p.windows.ring_tokens;
      keys += static_cast<int64_t>(at) * kRow;
      first = min(rows, end - at);
      side_rows = at - p.windows.sink_tokens;  // back to the ring's first row
      values_at = reinterpret_cast<const uint8_t*>(p.windows.v) -
                  reinterpret_cast<const uint8_t*>(p.windows.k);
      at += kExactTile;
      if (at >= end) at -= p.windows.ring_tokens;
    }
    const uint32_t to = ptx::shared_address(stages) + filled * Config::kStageBytes;
#if OSCAR_BULK_COPIES
    const uint32_t barrier = ptx::shared_address(barriers + filled);
    if (lane == 0) ptx::barrier_expect(barrier, 2 * rows * kRow);
    __syncwarp();
    const int side = lane % 2, wrapped = lane / 2;
    const int count = wrapped ? rows - first : first;
    if (lane < 4 && count > 0) {
      ptx::copy_bulk(to + side * (Config::kExactBytes / 2) + wrapped * first * kRow,
                     keys + side * values_at - (wrapped ? side_rows * kRow : 0), count * kRow,
                     barrier, ptx::evict_first_policy());
    }
#else
    constexpr int kVectors = kRow / 16;
#pragma unroll 1
    for (int i = lane; i < 2 * rows * kVectors; i += 32) {
      const int side = i >= rows * kVectors, at = i - side * rows * kVectors;
      const int wrapped = at >= first * kVectors;
      ptx::copy_16(to + side * (Config::kExactBytes / 2) + at * 16,
                   keys + side * values_at + at * 16 - (wrapped ? (side_rows + first) * kRow : 0));
    }
#endif
  }

  // Begins the run at the cold cursor and moves the cursor behind it.
  __device__ __forceinline__ void next_run(const AttentionParams& p, const ColumnShape& shape,
                                           int lane) {
    const EntryCursor c = cold->cursor;
    __syncwarp();  // all lanes have read it
    begin_run(p, shape, c, lane);
  }
  // Begins the run at c and puts the cursor behind it.
  __device__ __forceinline__ void begin_run(const AttentionParams& p, const ColumnShape& shape,
                                            EntryCursor c, int lane) {
    constexpr EntryWeights kWeights = Config::kWeights;
    const RequestShape& r = c.shape;
    const int entries = r.entries(), sink_end = r.history_entries + r.sink_tiles;
    const int limit = min(entries, kWeights.first_at(r, c.end - c.base));
    RunNote note;
    note.item = {c.b, static_cast<uint16_t>(c.head), static_cast<uint16_t>(c.column_tile)};
    note.base = c.base;
    note.last = c.base + kWeights.offset(r, max(1, entries) - 1);
    note.starts = c.entry == 0;
    note.exact = c.entry >= r.history_entries;
    int end, first, tokens;  // entries [c.entry, end); position and number of tokens
    if (!note.exact) {
      end = min(min(limit, r.history_entries), c.entry + 32 * (kPageTokens / kFullTile));
      const int from_page = c.entry / (kPageTokens / kFullTile);
      first = p.windows.sink_tokens + c.entry * kFullTile;
      tokens = r.history - c.entry * kFullTile;
      from = p.history.pool +
             static_cast<int64_t>(c.head) *
                 (Config::kPagedBf16 ? 2 * kPageTokens * Config::kExactRow : Config::kPageBytes);
      note.first_page = from_page;
      if (!Config::kPagedBf16 && p.centers.rows) {
        note.piece_end = min(limit, r.history_entries);
        // Here, where page numbers are waited for anyway.
        if (p.centers.first_position) note.first_position = p.centers.first_position[c.b];
      }
      at = c.entry % (kPageTokens / kFullTile);
      end = min(end, c.entry - at + 32 * (kPageTokens / kFullTile));
      page_id = 0;
      if (lane * (kPageTokens / kFullTile) < at + end - c.entry) {
        page_id = p.history.block_table[c.b * p.history.table_stride + from_page + lane];
      }
      note.last_valid = min(tokens, (end - c.entry) * kFullTile) - (end - c.entry - 1) * kFullTile;
    } else {
      const bool sink = c.entry < sink_end;
      end = sink ? min(limit, sink_end) : limit;
      first = (sink ? c.entry - r.history_entries : c.entry - sink_end) * kExactTile +
              (sink ? 0 : p.windows.sink_tokens + r.history);
      tokens = (sink ? min(r.seq_len, p.windows.sink_tokens) : r.seq_len) - first;
      const int64_t window = p.windows.slot ? p.windows.slot[c.b] : c.b;
      from = reinterpret_cast<const uint8_t*>(p.windows.k + window_offset(p.windows, window, c.head,
                                                                          p.num_kv_heads, 0,
                                                                          Config::kHeadDim));
      at = window_row(p.windows, first);
      // An empty request is one entry without tokens.
      end = max(end, c.entry + 1);
      note.last_valid =
          max(0, min(tokens, (end - c.entry) * kExactTile)) - (end - c.entry - 1) * kExactTile;
    }
    note.entries = end - c.entry;
    note.distance = first - (r.seq_len - p.q_len);
    note.ends = end >= entries;
    const int base = c.base;
    left = note.entries;
    exact = note.exact;
    c.entry = end;
    cursor_settle<Config::kPagedBf16>(c, p, kWeights, shape.column_tiles);
    live = c.live;
    note.closes = !c.live || c.base != base;
    if (lane == 0) {
      notes[runs % kRunNotes] = note;
      cold->cursor = c;
    }
    ++runs;
    __syncwarp();
  }

  // While full pages follow each other, a stage goes to the next page as soon as it was used, and
  // nothing else is asked. turns: how many times that can be done, now that `entries_left` entries
  // of the using side's run come after the one in use. Each time turn(), afterwards turned(turns).
  __device__ __forceinline__ int turns(int entries_left) const {
    return pending == kStages && !exact ? max(0, min(left, entries_left - 1)) : 0;
  }
  // Gives the stage in use, which all lanes are done with, to a page, and waits for the next stage.
  __device__ __forceinline__ uint8_t* turn(const AttentionParams& p, int turn, int lane) {
    __syncwarp();
    issue_page(p, used, at + turn, lane);
#if !OSCAR_BULK_COPIES
    ptx::commit_copies();
#endif
    step();
    return wait();
  }
  __device__ __forceinline__ void turned(int turns) {
    at += turns;
    left -= turns;
    filled = (filled + turns) % kStages;
  }
  __device__ __forceinline__ void step() {
    if (++used == kStages) {
      used = 0;
      phase ^= 1;
    }
  }

  // The oldest stage, once its bytes are there.
  __device__ __forceinline__ uint8_t* wait() const {
#if OSCAR_BULK_COPIES
    ptx::barrier_wait(ptx::shared_address(barriers + used), phase);
#else
    static_assert(kStages == 3, "");
    if (pending == 3) {
      ptx::wait_copies<2>();
    } else if (pending == 2) {
      ptx::wait_copies<1>();
    } else {
      ptx::wait_copies<0>();
    }
    __syncwarp();
#endif
    return stages + used * Config::kStageBytes;
  }
  // The stage that wait() returned may be overwritten once all lanes are here.
  __device__ __forceinline__ void release() {
    __syncwarp();
    --pending;
    step();
  }
};

}  // namespace oscar
