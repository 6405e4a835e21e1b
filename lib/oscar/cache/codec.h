// The INT2 codec of a row: clipping, thresholds between codes, scale and zero, shaped rounding,
// scale correction and key centers (math 4 and 5).
#pragma once

#include <string>
#include <vector>

#include "oscar/cache/numeric.h"

namespace oscar {

// The dtype of scale and zero, and rounding to it.

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

// The choices in which plain writers differ (math 4.6), and their names.

enum class ClipSpan : uint8_t { kHeadRow, kQuantGroup };  // whose magnitudes are ranked
enum class ZeroForm : uint8_t {
  kCodeUnits,  // zero = -lo / scale; x^ = (code - zero) scale
  kMinimum,    // zero = lo;          x^ = code scale + zero
};
enum class CodeTies : uint8_t { kUp, kEven };
// Scale and zero are rounded to the metadata dtype before codes are found from them, or after.
enum class MetadataRounding : uint8_t { kBeforeCoding, kAfterCoding };

// The defaults are this toolkit's codec, which alone rounds with noise shaping and
// corrects scales. Under every rule lo and hi are the smallest and largest clipped value of a
// group and scale = (hi - lo) / 3.
struct CodecRules {
  ClipSpan clip_span = ClipSpan::kHeadRow;
  ZeroForm zero = ZeroForm::kCodeUnits;
  CodeTies ties = CodeTies::kUp;
  MetadataRounding metadata_rounding = MetadataRounding::kBeforeCoding;

  bool operator==(const CodecRules&) const = default;
};

// What all rows of a cache share.
struct RowFormat {
  int quant_group_size = 128;  // divides head_dim
  MetadataDtype metadata = MetadataDtype::kFp16;
  CodecRules rules = {};  // other than the default: plain rounding, no scale correction

  bool operator==(const RowFormat&) const = default;
};

// The words for them in bundles, reports and options: "head_row", "quant_group"; "code_units",
// "minimum"; "up", "even"; "before_coding", "after_coding"; "fp16", "bf16", "fp32".
const char* codec_word(ClipSpan span);
const char* codec_word(ZeroForm zero);
const char* codec_word(CodeTies ties);
const char* codec_word(MetadataRounding rounding);
const char* codec_word(MetadataDtype dtype);
// False, and no change, for a word that is none of the type's.
bool parse_codec_word(const std::string& word, ClipSpan& span);
bool parse_codec_word(const std::string& word, ZeroForm& zero);
bool parse_codec_word(const std::string& word, CodeTies& ties);
bool parse_codec_word(const std::string& word, MetadataRounding& rounding);
bool parse_codec_word(const std::string& word, MetadataDtype& dtype);

// The INT2 row codec (math 4), element by element: clip index, scale and zero, code, value. The
// rules of this toolkit and of backends are defined here; faster copies are held to them.

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
OSCAR_HOST_DEVICE inline GroupScale group_scale(const RowFormat& format, float lo, float hi) {
  const CodecRules& rules = format.rules;
  const MetadataDtype dtype = format.metadata;
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

// The same by this toolkit's rules, whatever the format's.
OSCAR_HOST_DEVICE inline ScaleZero scale_and_zero(RowFormat format, float lo, float hi) {
  format.rules = {};
  return group_scale(format, lo, hi).stored;
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

// Where codes begin: the codec's division, additions and comparisons as one comparison per code
// (math 4.4).

// The neighbour of a finite value other than zero, towards -infinity or +infinity.
OSCAR_HOST_DEVICE inline float float_below(float x) {
  const uint32_t bits = float_bits(x);
  return float_from_bits(x > 0.0f ? bits - 1 : bits + 1);
}
OSCAR_HOST_DEVICE inline float float_above(float x) {
  const uint32_t bits = float_bits(x);
  return float_from_bits(x > 0.0f ? bits + 1 : bits - 1);
}

// Smallest float >= x.
OSCAR_HOST_DEVICE inline float float_from_below(double x) {
#if defined(__CUDA_ARCH__)
  return __double2float_ru(x);
#else
  const float nearest = static_cast<float>(x);
  return static_cast<double>(nearest) < x ? float_above(nearest) : nearest;
#endif
}

// The smallest fp32 x with code_of(x, sz) >= k, k = 1, 2 or 3; infinity if there is none.
// The codec's arithmetic is undone from its end. w + 0.5 rounds to k or more from a certain float w
// on; so quotient + zero has to reach the middle between w and the float below it, `sum`: at k = 1
// that middle rounds down, at 2 and 3 up to the even w. From there on quotients are >= `quotient`,
// and x / scale has to pass the middle below it in turn. That middle has 25 significant bits, so
// no fp32 x equals scale times it, and the product is exact in double.
OSCAR_HOST_DEVICE inline float code_threshold(int k, ScaleZero sz) {
  constexpr double kUlp = 1.0 / (1 << 24);
  const double sum = (k == 1 ? 0.5 - 0.75 * kUlp : k == 2 ? 1.5 - kUlp : 2.5 - 2 * kUlp) - sz.zero;
  float quotient = float_from_below(sum);
  if (k == 1 && static_cast<double>(quotient) == sum) quotient = float_above(quotient);
  const double middle = 0.5 * (static_cast<double>(float_below(quotient)) + quotient);
  return float_from_below(middle * sz.scale);
}

// Bit pattern of the smallest bf16 that is >= x.
OSCAR_HOST_DEVICE inline uint32_t bf16_from_below(float x) {
  const uint32_t bits = float_bits(x);
  return (x < 0.0f ? bits : bits + 0xffffu) >> 16;
}

// Noise-shaped rounding of one row (math 5.2): each code also absorbs the errors made before it.

// Codes of a row x [head_dim] (unclipped) with the scales and zeros of its quantization groups,
// so that e M e^T is small, where e = dequantized - x and M + damping = U D U^T.
// feedback: U [head_dim, head_dim], unit upper triangular; only entries above the diagonal are
// read. In ascending order target_i = x_i - sum over j < i of e_j U_{j,i}. `errors` [head_dim] is
// scratch and holds e afterwards. The idea is GPTQ's (arXiv 2210.17323), moved to cache rows.
void shaped_codes(const float* x, const float* feedback, const ScaleZero* groups, int head_dim,
                  int quant_group_size, float* errors, uint8_t* codes);

// One factor per row that removes the bias of rounding from the stored scale (math 5.3).

enum class ScaleCorrection : uint8_t { kNone = 0, kUnbiased = 1, kMetric = 2 };

// f = num / den, or 1 where the quotient means nothing, kept within [0.5, 2].
OSCAR_HOST_DEVICE inline float correction_factor(float num, float den) {
  if (!(num > 0.0f) || !(den > 0.0f) || !(den > mul_rn(1e-6f, num))) return 1.0f;
  const float f = div_rn(num, den);
  return f < 0.5f ? 0.5f : f > 2.0f ? 2.0f : f;
}

// f = <x, x> / <x, y>, x the row before clipping and y its dequantized form, both [head_dim].
float unbiased_factor(const float* x, const float* y, int head_dim);

// f = (x M x^T) / (x M y^T) with the undamped metric M [head_dim, head_dim].
float metric_factor(const float* x, const float* y, const float* metric, int head_dim);

// Two centers of keys a segment of positions (math 4.9): a key row is coded as what it differs by
// from the nearer one, and the sign of its scale says which one that is.

inline constexpr int kSegmentTokens = 1024;  // positions [1024 s, 1024 (s + 1)) are segment s
inline constexpr int kCenters = 2;

// The centers of one layer, transformed and centered as its rows are.
struct KeyCenters {
  // bf16 [segments][num_kv_heads][2][head_dim], 16-byte aligned; null: rows are coded as they are.
  const uint16_t* rows = nullptr;
  int segments = 0;                         // later positions belong to the last one
  const int32_t* first_position = nullptr;  // [batch] of each request's first token; null: 0
};

// The segment of all 64 rows of page `page` of a request: that of the page's middle.
OSCAR_HOST_DEVICE inline int segment_of_page(int first_position, int sink_tokens, int page,
                                             int segments) {
  constexpr int kHalfPage = 32;
  const int segment =
      (first_position + sink_tokens + 2 * kHalfPage * page + kHalfPage) / kSegmentTokens;
  return segment < segments ? segment : segments - 1;
}
OSCAR_HOST_DEVICE inline int segment_of_page(const KeyCenters& centers, int request,
                                             int sink_tokens, int page) {
  return segment_of_page(centers.first_position ? centers.first_position[request] : 0, sink_tokens,
                         page, centers.segments);
}

// The two centers of one segment and KV head, [2][head_dim].
OSCAR_HOST_DEVICE inline const uint16_t* centers_of(const KeyCenters& centers, int segment,
                                                    int head, int num_kv_heads, int head_dim) {
  return centers.rows + (static_cast<int64_t>(segment) * num_kv_heads + head) * kCenters * head_dim;
}

// Which of two centers [2][head_dim] is nearer to the bf16 row z [head_dim]: the first unless the
// second has the larger sum of o_i (z_i - o_i / 2). This order of sums defines it; kernels add in
// others and may choose differently where the two differ by rounding only.
OSCAR_HOST_DEVICE inline int nearest_center(const uint16_t* z, const uint16_t* centers,
                                            int head_dim) {
  float score[kCenters];
  for (int j = 0; j < kCenters; ++j) {
    score[j] = 0.0f;
    for (int i = 0; i < head_dim; ++i) {
      const float o = bf16_to_float(centers[j * head_dim + i]);
      score[j] = add_rn(score[j], mul_rn(o, sub_rn(bf16_to_float(z[i]), mul_rn(0.5f, o))));
    }
  }
  return score[1] > score[0];
}

// What is coded of an entry z of a row whose center has the entry o: bf16, like the row.
OSCAR_HOST_DEVICE inline uint16_t around_center(uint16_t z, uint16_t o) {
  return float_to_bf16(sub_rn(bf16_to_float(z), bf16_to_float(o)));
}

// The scale of a row's first quantization group as stored, positive otherwise, and what it says.
OSCAR_HOST_DEVICE inline float scale_with_center(float scale, int center) {
  return center ? -scale : scale;
}
OSCAR_HOST_DEVICE inline int center_of_scale(float stored) {
  return static_cast<int>(float_bits(stored) >> 31);
}
OSCAR_HOST_DEVICE inline float scale_without_center(float stored) {
  return float_from_bits(float_bits(stored) & 0x7fffffffu);
}

// How rows become INT2, in types: what a search chooses, a bundle keeps and every writer follows.

enum class Rounding : uint8_t { kPlain = 0, kShaped = 1 };

// Which rows of a text are INT2 for a query: all but the first sink_tokens and the last
// recent_tokens, which leave demote_block at a time (math 4.7). Sums weighted by attention add only
// where all three are the same.
struct Windows {
  int sink_tokens = 64, recent_tokens = 256, demote_block = 1;

  bool operator==(const Windows&) const = default;
};

// How a whole cache is written; in Python oscar_int2.recipe.CacheFormat.
struct CacheFormat {
  int bits = 2;
  int quant_group_size = 128;  // 0: head_dim, where that is not known yet
  int sink_tokens = 64;
  int recent_tokens = 256;
  int demote_block = 1;
  MetadataDtype metadata_dtype = MetadataDtype::kFp16;
  CodecRules rules = {};

  RowFormat row_format() const { return {quant_group_size, metadata_dtype, rules}; }
  Windows windows() const { return {sink_tokens, recent_tokens, demote_block}; }
  bool operator==(const CacheFormat&) const = default;
};

// What the rows of one head of one side (keys or values) share.
struct RowRecipe {
  float clip_ratio = 0.0f;  // <= 0: off
  ScaleCorrection scale_correction = ScaleCorrection::kNone;
  Rounding rounding = Rounding::kPlain;

  bool operator==(const RowRecipe&) const = default;
};

// The recipes of one side's heads; columns of equal length, as files and kernels take them.
struct SideRecipe {
  std::vector<float> clip_ratio;
  std::vector<ScaleCorrection> scale_correction;
  std::vector<Rounding> rounding;

  SideRecipe() = default;
  SideRecipe(size_t heads, const RowRecipe& recipe)
      : clip_ratio(heads, recipe.clip_ratio),
        scale_correction(heads, recipe.scale_correction),
        rounding(heads, recipe.rounding) {}

  size_t size() const { return clip_ratio.size(); }
  // Every column for all heads: one that is empty is filled with `missing`, one of a single entry
  // with that.
  void widen(size_t heads, const RowRecipe& missing) {
    const auto fill = [&](auto& column, auto value) {
      if (column.size() <= 1) column.resize(heads, column.empty() ? value : column.front());
    };
    fill(clip_ratio, missing.clip_ratio);
    fill(scale_correction, missing.scale_correction);
    fill(rounding, missing.rounding);
  }
  RowRecipe operator[](size_t head) const {
    return {clip_ratio[head], scale_correction[head], rounding[head]};
  }
  void push_back(const RowRecipe& recipe) {
    clip_ratio.push_back(recipe.clip_ratio);
    scale_correction.push_back(recipe.scale_correction);
    rounding.push_back(recipe.rounding);
  }
  // Whether some head corrects, or rounds, in this way.
  bool any(ScaleCorrection correction) const;
  bool any(Rounding way) const;

  bool operator==(const SideRecipe&) const = default;
};

// Average bits per cached element (math 4.8) of a context of `length` tokens of which the first
// `sink` and the last `recent` are exact, in 16 bits; 16 while all are.
double bits_per_element(const RowFormat& format, int64_t length, int64_t sink, int64_t recent);

}  // namespace oscar
