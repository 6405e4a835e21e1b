// A warp's own ring of shared-memory slots, filled ahead of use; no barrier between warps.
//
// Hopper and later fill a slot with the bulk copy engine and wait on an mbarrier; older devices use
// cp.async groups. An exact tile takes two slots in turn: its keys, then its values.
#pragma once

#include "attention_config.cuh"
#include "ptx.cuh"

namespace oscar {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define OSCAR_BULK_COPIES 1
#else
#define OSCAR_BULK_COPIES 0
#endif

// What a slot holds; written by lane 0 when the copy is issued.
enum class SlotKind : uint8_t { kPage, kExactKeys, kExactValues };
struct alignas(16) SlotNote {
  SlotKind kind;
  uint8_t started;  // the item's first entry
  uint8_t ended;    // the item's last entry
  uint8_t valid;    // tokens present
  int distance;     // exact: first position minus the position of query 0
  int b;
  uint16_t head, column_tile;
};

// The seldom-needed half of a ring's state, in shared memory: registers are short.
struct alignas(16) ColdCursor {
  EntryCursor cursor;   // next entry that is not a plain page
  int page_base = 0;    // entry whose page id lane 0 holds
  int page_owner = -1;  // weight before the item that the page ids belong to
  int first_index = 0;  // lane of the first plain page after the last other entry
  int half = 0;         // exact: 0 = keys are next, 1 = values
};

// Plain pages are full pages inside an item whose ids are at hand; they take the short way.
template <typename Config>
struct EntryRing {
  uint8_t* slots;      // kSlots * kSlotBytes
  SlotNote* notes;     // [kSlots]; not kept for plain pages
  uint64_t* barriers;  // [kSlots]
  ColdCursor* cold;
  int issued = 0, consumed = 0;
  int plain_left = 0;                  // plain pages that follow
  int page_index = 0;                  // lane that holds the next one's id
  int page_id = 0;                     // lane i: page of entry page_base + i
  uint32_t plain_slots = 0;            // bit per slot
  bool live = false;                   // the share has an entry after the plain pages
  const uint8_t* head_pool = nullptr;  // pool at the item's KV head

  __device__ bool pending() const { return consumed < issued; }
  __device__ bool done() const { return !pending() && !live && plain_left == 0; }
  __device__ bool front_is_plain() const { return plain_slots >> consumed % Config::kSlots & 1; }

  // Row of position `position` (of keys or values) of the cursor's item.
  __device__ static const uint8_t* exact_row(const AttentionParams& p, const EntryCursor& cursor,
                                             int side, int tile, int row) {
    const RequestShape& r = cursor.shape;
    const int head = cursor.head;
    if (Config::kPagedBf16 && cursor.entry < r.history_entries) {
      const int token = cursor.entry * kExactTile + row;
      const int64_t page =
          p.history.kv_indices[p.history.kv_indptr[cursor.b] + token / kPageTokens];
      const int64_t at =
          ((page * p.num_kv_heads + head) * 2 + side) * kPageTokens + token % kPageTokens;
      return p.history.pool + at * (2 * Config::kHeadDim);
    }
    const int position = tile < r.sink_tiles ? tile * kExactTile + row
                                             : p.windows.sink_tokens + r.history +
                                                   (tile - r.sink_tiles) * kExactTile + row;
    const int64_t slot = p.windows.slot ? p.windows.slot[cursor.b] : cursor.b;
    const uint16_t* rows = side ? p.windows.v : p.windows.k;
    return reinterpret_cast<const uint8_t*>(
        rows + window_offset(p.windows, slot, head, p.num_kv_heads, window_row(p.windows, position),
                             Config::kHeadDim));
  }

  // Tokens of the exact tile at the cursor, and its first position relative to query 0.
  __device__ static int exact_valid(const AttentionParams& p, const EntryCursor& cursor, int tile,
                                    int& distance) {
    const RequestShape& r = cursor.shape;
    int first, limit;
    if (Config::kPagedBf16 && cursor.entry < r.history_entries) {
      first = p.windows.sink_tokens + cursor.entry * kExactTile;
      limit = p.windows.sink_tokens + r.history;
    } else if (tile < r.sink_tiles) {
      first = tile * kExactTile;
      limit = min(r.seq_len, p.windows.sink_tokens);
    } else {
      first = p.windows.sink_tokens + r.history + (tile - r.sink_tiles) * kExactTile;
      limit = r.seq_len;
    }
    distance = first - (r.seq_len - p.q_len);
    return max(0, min(kExactTile, limit - first));
  }

  // After release(): the freed slot takes the next plain page, if one follows. The short way of
  // refill() for the inner loop; false when the long way is due.
  __device__ bool refill_plain(const AttentionParams& p, int lane, uint64_t policy) {
    if (plain_left == 0) return false;
    const int slot = issued % Config::kSlots;
    --plain_left;
    plain_slots |= 1u << slot;
    copy_page(p, slot, __shfl_sync(~0u, page_id, page_index++), lane, policy);
#if !OSCAR_BULK_COPIES
    ptx::commit_copies();
#endif
    ++issued;
    return true;
  }

  // Fills free slots. All lanes take part.
  __device__ void refill(const AttentionParams& p, const EntryWeights& weights, int column_tiles,
                         int lane, uint64_t policy) {
    while (issued - consumed < Config::kSlots && (plain_left > 0 || live)) {
      const int slot = issued % Config::kSlots;
      if (refill_plain(p, lane, policy)) continue;
      plain_slots &= ~(1u << slot);
      issue_other(p, weights, column_tiles, slot, lane, policy);
#if !OSCAR_BULK_COPIES
      ptx::commit_copies();
#endif
      ++issued;
    }
  }

  __device__ void copy_page(const AttentionParams& p, int slot, int page, int lane,
                            uint64_t policy) {
    const uint32_t to = ptx::shared_address(slots + slot * Config::kSlotBytes);
    const uint8_t* from =
        head_pool + static_cast<uint64_t>(static_cast<uint32_t>(page)) *
                        static_cast<uint32_t>(p.num_kv_heads * Config::kChunkBytes);
#if OSCAR_BULK_COPIES
    if (lane == 0) {
      const uint32_t barrier = ptx::shared_address(barriers + slot);
      ptx::barrier_expect(barrier, Config::kChunkBytes);
      ptx::copy_bulk(to, from, Config::kChunkBytes, barrier, policy);
    }
#else
    for (int at = lane * 16; at < Config::kChunkBytes; at += 512) {
      ptx::copy_16(to + at, from + at);
    }
#endif
  }

  // Any entry, by the long way; then looks how many plain pages follow.
  __device__ void issue_other(const AttentionParams& p, const EntryWeights& weights,
                              int column_tiles, int slot, int lane, uint64_t policy) {
    EntryCursor cursor = cold->cursor;
    int page_base = cold->page_base;
    cursor.entry += page_index - cold->first_index;  // plain pages issued since
    const RequestShape& r = cursor.shape;
    const bool paged = !Config::kPagedBf16 && cursor.entry < r.history_entries;
    const int half = cold->half;
    SlotNote note;
    note.kind = paged ? SlotKind::kPage : half ? SlotKind::kExactValues : SlotKind::kExactKeys;
    note.started = cursor.entry == 0;
    note.ended = cursor.entry + 1 >= r.entries();
    note.b = cursor.b;
    note.head = static_cast<uint16_t>(cursor.head);
    note.column_tile = static_cast<uint16_t>(cursor.column_tile);
    note.distance = 0;
    int next_half = 0;
    if (paged) {
      note.valid = static_cast<uint8_t>(min(kPageTokens, r.history - cursor.entry * kPageTokens));
      if (cold->page_owner != cursor.base || cursor.entry - page_base >= 32) {
        head_pool = p.history.pool + static_cast<int64_t>(cursor.head) * Config::kChunkBytes;
        page_base = cursor.entry;
        page_id = 0;
        if (page_base + lane < r.history_entries) {
          page_id = p.history.kv_indices[p.history.kv_indptr[cursor.b] + page_base + lane];
        }
      }
      if (lane == 0) notes[slot] = note;
      copy_page(p, slot, __shfl_sync(~0u, page_id, cursor.entry - page_base), lane, policy);
    } else {
      const int tile = Config::kPagedBf16 && cursor.entry < r.history_entries
                           ? 0
                           : cursor.entry - r.history_entries;
      note.valid = static_cast<uint8_t>(exact_valid(p, cursor, tile, note.distance));
      if (lane == 0) notes[slot] = note;
      copy_exact(p, cursor, half, tile, note.valid, slot, lane, policy);
      next_half = half ^ 1;
    }
    const int owner = paged ? cursor.base : -1;
    if (next_half == 0) cursor_next<Config::kPagedBf16>(cursor, p, weights, column_tiles);
    const bool inside = cursor.b < p.batch;
    plain_left = 0;
    page_index = cursor.entry - page_base;
    if (paged && inside && owner == cursor.base) {
      const int limit = min(min(page_base + 32, r.history / kPageTokens),
                            min(r.entries() - 1, weights.first_at(r, cursor.end - cursor.base)));
      plain_left = max(0, limit - cursor.entry);
    }
    live = inside && cursor.base + weights.offset(r, cursor.entry + plain_left) < cursor.end;
    __syncwarp();  // all lanes have read the old state
    if (lane == 0) {
      cold->cursor = cursor;
      cold->page_base = page_base;
      cold->page_owner = owner;
      cold->first_index = page_index;
      cold->half = next_half;
    }
    __syncwarp();
  }

  // Keys or values of an exact tile, row by row so that they land padded.
  __device__ void copy_exact(const AttentionParams& p, const EntryCursor& cursor, int half,
                             int tile, int valid, int slot, int lane, uint64_t policy) {
    constexpr int kRow = 2 * Config::kHeadDim;
    const uint32_t to = ptx::shared_address(slots + slot * Config::kSlotBytes);
#if OSCAR_BULK_COPIES
    const uint32_t barrier = ptx::shared_address(barriers + slot);
    if (lane == 0) ptx::barrier_expect(barrier, valid > 0 ? kExactTile * kRow : 0);
    __syncwarp();
    if (valid > 0 && lane < kExactTile) {  // absent rows repeat the last: finite, unused
      ptx::copy_bulk(to + lane * Config::kExactPitch,
                     exact_row(p, cursor, half, tile, min(lane, valid - 1)), kRow, barrier, policy);
    }
#else
    for (int i = lane; valid > 0 && i < kExactTile * (kRow / 16); i += 32) {
      const int row = i / (kRow / 16), at = i % (kRow / 16) * 16;
      ptx::copy_16(to + row * Config::kExactPitch + at,
                   exact_row(p, cursor, half, tile, min(row, valid - 1)) + at);
    }
#endif
  }

  // The oldest slot, once its bytes are there.
  __device__ const uint8_t* wait() const {
    const int slot = consumed % Config::kSlots;
#if OSCAR_BULK_COPIES
    ptx::barrier_wait(ptx::shared_address(barriers + slot), consumed / Config::kSlots & 1);
#else
    static_assert(Config::kSlots == 2, "waits for all but the newest copy, or for all");
    if (issued - consumed == 2) {
      ptx::wait_copies<1>();
    } else {
      ptx::wait_copies<0>();
    }
    __syncwarp();
#endif
    return slots + slot * Config::kSlotBytes;
  }
  __device__ SlotNote front_note() const { return notes[consumed % Config::kSlots]; }
  // The slot that wait() returned may be overwritten once all lanes are here.
  __device__ void release() {
    __syncwarp();
    ++consumed;
  }
};

}  // namespace oscar
