// The INT2 codec of a row: clipping, thresholds between codes, scale and zero, shaped rounding,
// scale correction and key centers (math 4 and 5).
#include "oscar/cache/codec.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <utility>

#include "oscar/cache/products.h"
#include "oscar/cache/rival_formats.h"

namespace oscar {

// The words of each choice, once.

namespace {

template <typename Choice, size_t kCount>
using Words = std::array<std::pair<Choice, const char*>, kCount>;

constexpr Words<ClipSpan, 2> kSpans = {
    {{ClipSpan::kHeadRow, "head_row"}, {ClipSpan::kQuantGroup, "quant_group"}}};
constexpr Words<ZeroForm, 2> kZeros = {
    {{ZeroForm::kCodeUnits, "code_units"}, {ZeroForm::kMinimum, "minimum"}}};
constexpr Words<CodeTies, 2> kTies = {{{CodeTies::kUp, "up"}, {CodeTies::kEven, "even"}}};
constexpr Words<MetadataRounding, 2> kRoundings = {
    {{MetadataRounding::kBeforeCoding, "before_coding"},
     {MetadataRounding::kAfterCoding, "after_coding"}}};
constexpr Words<MetadataDtype, 3> kDtypes = {{{MetadataDtype::kFp16, "fp16"},
                                              {MetadataDtype::kBf16, "bf16"},
                                              {MetadataDtype::kFp32, "fp32"}}};

template <typename Choice, size_t kCount>
const char* word_in(const Words<Choice, kCount>& words, Choice choice) {
  for (const auto& [known, word] : words) {
    if (known == choice) return word;
  }
  return words[0].second;
}

template <typename Choice, size_t kCount>
bool find_in(const Words<Choice, kCount>& words, const std::string& word, Choice& choice) {
  for (const auto& [known, name] : words) {
    if (word != name) continue;
    choice = known;
    return true;
  }
  return false;
}

}  // namespace

const char* codec_word(ClipSpan span) { return word_in(kSpans, span); }
const char* codec_word(ZeroForm zero) { return word_in(kZeros, zero); }
const char* codec_word(CodeTies ties) { return word_in(kTies, ties); }
const char* codec_word(MetadataRounding rounding) { return word_in(kRoundings, rounding); }
const char* codec_word(MetadataDtype dtype) { return word_in(kDtypes, dtype); }
bool parse_codec_word(const std::string& word, ClipSpan& span) {
  return find_in(kSpans, word, span);
}
bool parse_codec_word(const std::string& word, ZeroForm& zero) {
  return find_in(kZeros, word, zero);
}
bool parse_codec_word(const std::string& word, CodeTies& ties) {
  return find_in(kTies, word, ties);
}
bool parse_codec_word(const std::string& word, MetadataRounding& rounding) {
  return find_in(kRoundings, word, rounding);
}
bool parse_codec_word(const std::string& word, MetadataDtype& dtype) {
  return find_in(kDtypes, word, dtype);
}

// Order statistics and packing of single rows.

float magnitude_of_rank(const float* x, int head_dim, int rank) {
  assert(head_dim <= kMaxHeadDim && rank >= 0 && rank < head_dim);
  float magnitudes[kMaxHeadDim];
  for (int i = 0; i < head_dim; ++i) magnitudes[i] = std::fabs(x[i]);
  std::nth_element(magnitudes, magnitudes + rank, magnitudes + head_dim);
  return magnitudes[rank];
}

void pack_row(const uint8_t* codes, int head_dim, PackOrder order, uint8_t* packed) {
  std::fill(packed, packed + head_dim / 4, uint8_t{0});
  for (int i = 0; i < head_dim; ++i) {
    packed[packed_byte(i, head_dim, order)] |=
        static_cast<uint8_t>(codes[i] << packed_shift(i, head_dim, order));
  }
}

void unpack_row(const uint8_t* packed, int head_dim, PackOrder order, uint8_t* codes) {
  for (int i = 0; i < head_dim; ++i) {
    codes[i] = static_cast<uint8_t>(unpack_code(packed, i, head_dim, order));
  }
}

// Shaped rounding and scale correction of one row.

void shaped_codes(const float* x, const float* feedback, const ScaleZero* groups, int head_dim,
                  int quant_group_size, float* errors, uint8_t* codes) {
  assert(head_dim <= kMaxHeadDim);
  float pushed[kMaxHeadDim] = {};  // at j: the sum over i of e_i U_{i,j}, as far as it is known
  for (int i = 0; i < head_dim; ++i) {
    const ScaleZero sz = groups[i / quant_group_size];
    const int code = code_of(sub_rn(x[i], pushed[i]), sz);
    codes[i] = static_cast<uint8_t>(code);
    errors[i] = sub_rn(dequantize(code, sz), x[i]);
    const int next = i + 1;
    add_products(errors + i, 1, feedback + int64_t{i} * head_dim + next, head_dim, head_dim - next,
                 pushed + next);
  }
}

float unbiased_factor(const float* x, const float* y, int head_dim) {
  float num = 0.0f, den = 0.0f;
  for (int i = 0; i < head_dim; ++i) {
    num = add_rn(num, mul_rn(x[i], x[i]));
    den = add_rn(den, mul_rn(x[i], y[i]));
  }
  return correction_factor(num, den);
}

float metric_factor(const float* x, const float* y, const float* metric, int head_dim) {
  assert(head_dim <= kMaxHeadDim);
  float weighted[kMaxHeadDim] = {};  // x M
  add_products(x, head_dim, metric, head_dim, head_dim, weighted);
  float num = 0.0f, den = 0.0f;
  for (int i = 0; i < head_dim; ++i) {
    num = add_rn(num, mul_rn(weighted[i], x[i]));
    den = add_rn(den, mul_rn(weighted[i], y[i]));
  }
  return correction_factor(num, den);
}

// Questions to a side's recipe.

bool SideRecipe::any(ScaleCorrection correction) const {
  return std::find(scale_correction.begin(), scale_correction.end(), correction) !=
         scale_correction.end();
}

bool SideRecipe::any(Rounding way) const {
  return std::find(rounding.begin(), rounding.end(), way) != rounding.end();
}

double bits_per_element(const RowFormat& format, int64_t length, int64_t sink, int64_t recent) {
  return bits_per_element(row_bits(format, 2), length, sink, recent);
}

}  // namespace oscar
