// Compile-time sizes of one attention instantiation, and its shared memory.
#pragma once

#include "code_layout.cuh"
#include "work_plan.cuh"

namespace oscar {

template <int kHeadDim_, int kGroups_, MetadataDtype kMetadata_, PackOrder kOrder_,
          int kColumnTiles_, bool kPagedBf16_>
struct AttentionConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroups = kGroups_;
  static constexpr MetadataDtype kMetadata = kMetadata_;
  static constexpr PackOrder kOrder = kOrder_;
  static constexpr int kNT = kColumnTiles_;        // tensor-core column tiles of eight
  static constexpr int kColumns = 8 * kNT;         // (query, head) columns of an item
  static constexpr bool kPagedBf16 = kPagedBf16_;  // the bf16 twin: history pages hold bf16 rows
  using Layout = CodeLayout<kHeadDim, kGroups, kOrder>;
  static constexpr int kTiles = Layout::kTiles;

  static constexpr int kMetadataBytes = kMetadata == MetadataDtype::kFp32 ? 4 : 2;
  static constexpr int kMetadataRow = kGroups * 2 * kMetadataBytes;
  static constexpr int kChunkBytes = 2 * kPageTokens * (kHeadDim / 4 + kMetadataRow);
  static constexpr int kExactPitch = 2 * kHeadDim + 16;  // padded against bank conflicts
  static constexpr int kExactBytes = kExactTile * kExactPitch;
  // Tiles of a page whose instructions interleave, as far as the registers go.
  static constexpr int kSpan = kHeadDim * kNT <= 128 ? 4 : 2;
  static constexpr int kSlots = 2;  // ring slots a warp owns
  static constexpr int kSlotBytes =
      kPagedBf16 ? kExactBytes : (kChunkBytes > kExactBytes ? kChunkBytes : kExactBytes);
  // Q in bf16, or half the columns of the accumulator while it changes layout.
  static constexpr int kTurnPitch = kHeadDim + 4;  // floats
  static constexpr int kScratchBytes =
      kColumns * kExactPitch > 4 * kTurnPitch * 4 ? kColumns* kExactPitch : 4 * kTurnPitch * 4;
  static constexpr int kHeldBytes = 32 * 16 * kNT;  // weights between an exact tile's two halves
  static constexpr int kWarpBytes = kSlots * kSlotBytes + kScratchBytes + kHeldBytes;
  // A partial result: accumulator fragments, then (reference, sum) per column.
  static constexpr int kPartialFragments = kNT * kTiles * 32;  // float4 each
  static constexpr int kPartialBytes = kPartialFragments * 16 + kColumns * 8;
  static_assert(kPartialBytes <= kSlots * kSlotBytes, "a partial result waits in the ring");
  static_assert(kHeldBytes % 16 == 0 && kSlotBytes % 16 == 0 && kScratchBytes % 16 == 0 &&
                    kPartialBytes % 16 == 0,
                "");
  static constexpr int kMaxWarps = kHeadDim * kNT <= 128 ? 16 : 8;  // bounds the registers

  static constexpr int kHistoryWeight =
      kPagedBf16 ? 2 * kExactTile * kHeadDim * 2 / 256 : kChunkBytes / 256;
  // Exact tiles come in small row copies through two slots: measured, they take 9/4 of the time
  // that their bytes would as pages.
  static constexpr int kExactWeight =
      (kPagedBf16 ? 4 : 9) * 2 * kExactTile * kHeadDim * 2 / 256 / 4;
};

}  // namespace oscar
