// The INT2 row codec, element by element: clip index, scale and zero, code, dequantized value.
#pragma once

#include "oscar/cache/metadata.h"
#include "oscar/cache/rounded_arithmetic.h"

namespace oscar {

inline constexpr float kMinScale = 1e-8f / 3.0f;
inline constexpr float kMinScaleFp16 = 6.103515625e-05f;     // 2^-14, the smallest normal fp16
inline constexpr float kMinScaleOfZeroFp16 = 9.765625e-04f;  // 2^-10 |lo|: |zero| within 1024
inline constexpr int kMaxHeadDim = 256;

// How the four codes of a byte are chosen; lowest bits first in both.
enum class PackOrder : uint8_t {
  kConsecutive = 0,  // byte b: dims 4b, 4b+1, 4b+2, 4b+3
  kQuartered = 1,    // byte b: dims b, b + d/4, b + d/2, b + 3d/4
};

// What can be wrong with a row. Values are bits, so that many rows can be or-ed together.
enum class RowStatus : uint8_t {
  kOk = 0,
  kNonFinite = 1,         // an infinity or NaN among the values
  kMetadataOverflow = 2,  // the range does not fit the metadata dtype
};

struct ScaleZero {
  float scale = 0.0f;  // rounded to the metadata dtype
  float zero = 0.0f;   // in code units, rounded to the metadata dtype, never -0
};

// Index, in the ascending sort of |x| over the whole row, of the clip threshold.
// clip_ratio <= 0 means no clipping: -1.
OSCAR_HOST_DEVICE inline int clip_threshold_index(float clip_ratio, int head_dim) {
  if (!(clip_ratio > 0.0f)) return -1;
  const float product = mul_rn(clip_ratio, static_cast<float>(head_dim));
  if (product >= static_cast<float>(head_dim - 1)) return head_dim - 1;
  return static_cast<int>(product);  // positive, so truncation is floor
}

// Scale and zero of one quantization group from the smallest and largest clipped value.
// The floors keep constant and zero rows finite; ordinary rows never meet them.
OSCAR_HOST_DEVICE inline ScaleZero scale_and_zero(float lo, float hi, MetadataDtype dtype) {
  float scale = div_rn(sub_rn(hi, lo), 3.0f);
  if (scale < kMinScale) scale = kMinScale;
  if (dtype == MetadataDtype::kFp16) {
    const float magnitude = lo < 0.0f ? -lo : lo;
    const float floor_of_zero = mul_rn(magnitude, kMinScaleOfZeroFp16);
    if (scale < floor_of_zero) scale = floor_of_zero;
    if (scale < kMinScaleFp16) scale = kMinScaleFp16;
  }
  ScaleZero out;
  out.scale = round_to_metadata(scale, dtype);
  out.zero = round_to_metadata(div_rn(-lo, out.scale), dtype);
  if (out.zero == 0.0f) out.zero = 0.0f;  // -0 becomes +0
  return out;
}

OSCAR_HOST_DEVICE inline bool is_finite(float x) {
  return (float_bits(x) & 0x7f800000u) != 0x7f800000u;
}

// clamp(floor(x / scale + zero + 0.5), 0, 3). Counting thresholds is the clamped floor.
OSCAR_HOST_DEVICE inline int code_of(float x, ScaleZero sz) {
  const float t = add_rn(add_rn(div_rn(x, sz.scale), sz.zero), 0.5f);
  return static_cast<int>(t >= 1.0f) + static_cast<int>(t >= 2.0f) + static_cast<int>(t >= 3.0f);
}

OSCAR_HOST_DEVICE inline float dequantize(int code, ScaleZero sz) {
  return mul_rn(sub_rn(static_cast<float>(code), sz.zero), sz.scale);
}

// Byte and bit position of dimension `dim` in a packed row of head_dim / 4 bytes.
OSCAR_HOST_DEVICE inline int packed_byte(int dim, int head_dim, PackOrder order) {
  return order == PackOrder::kConsecutive ? dim / 4 : dim % (head_dim / 4);
}
OSCAR_HOST_DEVICE inline int packed_shift(int dim, int head_dim, PackOrder order) {
  return 2 * (order == PackOrder::kConsecutive ? dim % 4 : dim / (head_dim / 4));
}

OSCAR_HOST_DEVICE inline int unpack_code(const uint8_t* row, int dim, int head_dim,
                                         PackOrder order) {
  return (row[packed_byte(dim, head_dim, order)] >> packed_shift(dim, head_dim, order)) & 3;
}

// Metadata of 2 or 4 bytes at any address that is a multiple of its size.
OSCAR_HOST_DEVICE inline void store_metadata(void* base, int64_t index, float value,
                                             MetadataDtype dtype) {
  if (dtype == MetadataDtype::kFp32) {
    static_cast<float*>(base)[index] = value;
  } else {
    static_cast<uint16_t*>(base)[index] =
        dtype == MetadataDtype::kFp16 ? float_to_fp16(value) : float_to_bf16(value);
  }
}
OSCAR_HOST_DEVICE inline float load_metadata(const void* base, int64_t index, MetadataDtype dtype) {
  if (dtype == MetadataDtype::kFp32) return static_cast<const float*>(base)[index];
  const uint16_t bits = static_cast<const uint16_t*>(base)[index];
  return dtype == MetadataDtype::kFp16 ? fp16_to_float(bits) : bf16_to_float(bits);
}

// The value whose rank among |x[0..head_dim)| is `rank` (0 = smallest): the clip threshold.
// Plain form, exact for any finite input; allocates nothing.
float magnitude_of_rank(const float* x, int head_dim, int rank);

// Packs and unpacks one row of codes (each 0..3) to and from head_dim / 4 bytes.
void pack_row(const uint8_t* codes, int head_dim, PackOrder order, uint8_t* packed);
void unpack_row(const uint8_t* packed, int head_dim, PackOrder order, uint8_t* codes);

}  // namespace oscar
