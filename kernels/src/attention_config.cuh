// Compile-time sizes of one attention instantiation, and its shared memory.
#pragma once

#include "code_layout.cuh"
#include "work_plan.cuh"

namespace oscar {

template <int kHeadDim_, int kGroups_, MetadataDtype kMetadata_, bool kPairedTiles_,
          bool kPagedBf16_>
struct AttentionConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroups = kGroups_;
  static constexpr MetadataDtype kMetadata = kMetadata_;
  // An item of at most four (query, head) columns has them in the tensor core's eight twice: of the
  // scores a lane takes column c from even tiles of INT2 pages and c + 4 from odd ones, so that no
  // lane idles; in the output the upper four mean nothing.
  static constexpr bool kPairedTiles = kPairedTiles_;
  static constexpr int kSetTiles = kPairedTiles ? 2 : 1;  // tiles that lanes share so
  static constexpr int kColumns = 8 / kSetTiles;          // (query, head) columns of an item
  static constexpr bool kPagedBf16 =
      kPagedBf16_;  // the BF16 baseline: history pages hold bf16 rows
  using Layout = CodeLayout<kHeadDim, kGroups>;
  static constexpr int kTiles = Layout::kTiles;
  static constexpr int kRowWords = kHeadDim / 8;  // of a bf16 row, in each of four lanes

  // Tiles of a page whose instructions interleave.
  static constexpr int kSpanTiles = kPairedTiles || kGroups == 1 ? 4 : 2;
  static constexpr int kSpanTokens = 16 * kSpanTiles;

  static constexpr int kMetadataBytes = kMetadata == MetadataDtype::kFp32 ? 4 : 2;
  static constexpr int kMetadataRow = kGroups * 2 * kMetadataBytes;
  // fp16 zeros are exact tensor-core operands: the products with them take no other instruction.
  static constexpr bool kZerosOnTensor = kMetadata == MetadataDtype::kFp16;
  static constexpr int kPageBytes = 2 * kPageTokens * (kHeadDim / 4 + kMetadataRow);
  static constexpr int kExactRow = 2 * kHeadDim;
  static constexpr int kExactBytes = 2 * kExactTile * kExactRow;  // keys, then values
  static constexpr int kStages = 3;                               // ring stages a warp owns
  static constexpr int kStageBytes =
      kPagedBf16 ? kExactBytes : (kPageBytes > kExactBytes ? kPageBytes : kExactBytes);
  static constexpr int kRingBytes = kStages * kStageBytes;
  // A partial result of an item: pairs of columns per dimension, then (reference, sum) per column.
  static constexpr int kPairs = kHeadDim * kColumns / 2;
  static constexpr int kPartialBytes = (kPairs + kColumns) * 8;
  static_assert(kStageBytes % 16 == 0 && kPartialBytes % 16 == 0, "");
  // Bounds the registers: fewer warps whose instructions interleave beat more that wait in turn.
  static constexpr int kMaxWarps = kHeadDim == 64 ? 16 : kHeadDim == 128 ? 12 : 8;
  // Blocks that may have parts of an item: their factors, and before them those of the up to two
  // pieces of each warp, lie behind the first warp's partial in its ring.
  static constexpr int kMaxBlocks = (kRingBytes - kPartialBytes) / (4 * kColumns);
  static_assert(kMaxBlocks >= 2 * kMaxWarps, "");

  // In units of 256 bytes.
  static constexpr EntryWeights kWeights = {kPagedBf16 ? kExactBytes / 256 : kPageBytes / 256,
                                            kExactBytes / 256};
};

}  // namespace oscar
