// The INT2 row codec (math 4), element by element: clip index, scale and zero, code, value. The
// rules of this toolkit and of serving stacks are defined here; faster copies are held to them.
#pragma once

#include "oscar/cache/codec_rules.h"

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

// Index, in the ascending sort of |x| over the whole row, of the clip threshold (math 4.2).
// clip_ratio <= 0 means no clipping: -1.
OSCAR_HOST_DEVICE inline int clip_threshold_index(float clip_ratio, int head_dim) {
  if (!(clip_ratio > 0.0f)) return -1;
  const float product = mul_rn(clip_ratio, static_cast<float>(head_dim));
  if (product >= static_cast<float>(head_dim - 1)) return head_dim - 1;
  return static_cast<int>(product);  // positive, so truncation is floor
}

// Scale and zero of one quantization group (math 4.3), from which its codes are found and as they
// are stored: the same when metadata is rounded before coding.
struct GroupScale {
  ScaleZero coding, stored;
};

// From the smallest and largest clipped value. The floors keep constant and zero rows finite;
// ordinary rows never meet them.
OSCAR_HOST_DEVICE inline GroupScale group_scale(const CodecRules& rules, MetadataDtype dtype,
                                                float lo, float hi) {
  const bool fp16 = dtype == MetadataDtype::kFp16;
  const bool before = rules.metadata_rounding == MetadataRounding::kBeforeCoding;
  float scale = div_rn(sub_rn(hi, lo), 3.0f), zero = lo;
  if (scale < kMinScale) scale = kMinScale;
  if (fp16 && scale < kMinScaleFp16) scale = kMinScaleFp16;
  if (rules.zero == ZeroForm::kCodeUnits) {
    const float floor_of_zero = mul_rn(lo < 0.0f ? -lo : lo, kMinScaleOfZeroFp16);
    if (fp16 && scale < floor_of_zero) scale = floor_of_zero;
    if (before) scale = round_to_metadata(scale, dtype);
    zero = div_rn(-lo, scale);
  }
  GroupScale out;
  out.stored.scale = round_to_metadata(scale, dtype);
  out.stored.zero = round_to_metadata(zero, dtype);
  if (out.stored.zero == 0.0f) out.stored.zero = 0.0f;  // -0 becomes +0
  out.coding = out.stored;
  if (!before) {
    out.coding.scale = scale;
    out.coding.zero = zero;
  }
  return out;
}

// The same of this toolkit's codec.
OSCAR_HOST_DEVICE inline ScaleZero scale_and_zero(float lo, float hi, MetadataDtype dtype) {
  return group_scale(CodecRules{}, dtype, lo, hi).stored;
}

OSCAR_HOST_DEVICE inline bool is_finite(float x) {
  return (float_bits(x) & 0x7f800000u) != 0x7f800000u;
}

// The nearest of the four codes (math 4.4) to (x / scale) + zero, or to (x - zero) / scale.
// Counting thresholds is clamping: halves up is the clamped floor of t + .5; of the ties
// .5, 1.5, 2.5 the first and the last have an even neighbour below.
OSCAR_HOST_DEVICE inline int code_of(const CodecRules& rules, float x, ScaleZero sz) {
  const float t = rules.zero == ZeroForm::kCodeUnits ? add_rn(div_rn(x, sz.scale), sz.zero)
                                                     : div_rn(sub_rn(x, sz.zero), sz.scale);
  if (rules.ties == CodeTies::kEven) {
    return static_cast<int>(t > 0.5f) + static_cast<int>(t >= 1.5f) + static_cast<int>(t > 2.5f);
  }
  const float up = add_rn(t, 0.5f);
  return static_cast<int>(up >= 1.0f) + static_cast<int>(up >= 2.0f) + static_cast<int>(up >= 3.0f);
}
OSCAR_HOST_DEVICE inline int code_of(float x, ScaleZero sz) { return code_of(CodecRules{}, x, sz); }

OSCAR_HOST_DEVICE inline float dequantize(const CodecRules& rules, int code, ScaleZero sz) {
  const float number = static_cast<float>(code);
  return rules.zero == ZeroForm::kCodeUnits ? mul_rn(sub_rn(number, sz.zero), sz.scale)
                                            : add_rn(mul_rn(number, sz.scale), sz.zero);
}
OSCAR_HOST_DEVICE inline float dequantize(int code, ScaleZero sz) {
  return dequantize(CodecRules{}, code, sz);
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
