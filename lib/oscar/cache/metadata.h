// The dtype of scale and zero, and rounding to it.
#pragma once

#include "oscar/cache/numeric.h"

namespace oscar {

enum class MetadataDtype : uint8_t { kFp16 = 0, kBf16 = 1, kFp32 = 2 };

OSCAR_HOST_DEVICE inline float round_to_metadata(float value, MetadataDtype dtype) {
  if (dtype == MetadataDtype::kFp16) return fp16_to_float(float_to_fp16(value));
  if (dtype == MetadataDtype::kBf16) return bf16_to_float(float_to_bf16(value));
  return value;
}

// Every word of the metadata of a row that was refused: NaN in each dtype, so that what is worked
// out from the row is NaN too.
inline constexpr uint32_t kRefusedMetadata = 0x7fff7fffu;

OSCAR_HOST_DEVICE inline int metadata_bytes(MetadataDtype dtype) {
  return dtype == MetadataDtype::kFp32 ? 4 : 2;
}

}  // namespace oscar
