// The plain writer and reader of one group, with every rule spelled out.
#include "oscar/cache/codec_rules.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "oscar/cache/codec.h"

namespace oscar {
namespace {

template <typename Rule>
using Names = std::array<std::pair<Rule, const char*>, 2>;

constexpr Names<ClipSpan> kSpans = {
    {{ClipSpan::kHeadRow, "head_row"}, {ClipSpan::kQuantGroup, "quant_group"}}};
constexpr Names<ZeroForm> kZeros = {
    {{ZeroForm::kCodeUnits, "code_units"}, {ZeroForm::kMinimum, "minimum"}}};
constexpr Names<CodeTies> kTies = {{{CodeTies::kUp, "up"}, {CodeTies::kEven, "even"}}};
constexpr Names<MetadataRounding> kRoundings = {{{MetadataRounding::kBeforeCoding, "before_coding"},
                                                 {MetadataRounding::kAfterCoding, "after_coding"}}};

template <typename Rule>
const char* name_in(const Names<Rule>& names, Rule rule) {
  return names[0].first == rule ? names[0].second : names[1].second;
}

template <typename Rule>
bool find_in(const Names<Rule>& names, std::string_view name, Rule& rule) {
  for (const auto& [value, known] : names) {
    if (name != known) continue;
    rule = value;
    return true;
  }
  return false;
}

// Before any rounding to the metadata dtype, but for what keeps constant and zero rows finite.
ScaleZero exact_scale_and_zero(const CodecRules& rules, MetadataDtype metadata, float lo,
                               float hi) {
  ScaleZero sz{.scale = std::max(div_rn(sub_rn(hi, lo), 3.0f), kMinScale), .zero = lo};
  if (metadata == MetadataDtype::kFp16) sz.scale = std::max(sz.scale, kMinScaleFp16);
  if (rules.zero == ZeroForm::kCodeUnits) {
    if (metadata == MetadataDtype::kFp16) {
      sz.scale = std::max(sz.scale, mul_rn(std::fabs(lo), kMinScaleOfZeroFp16));
    }
    if (rules.metadata_rounding == MetadataRounding::kBeforeCoding) {
      sz.scale = round_to_metadata(sz.scale, metadata);
    }
    sz.zero = div_rn(-lo, sz.scale);
  }
  return sz;
}

ScaleZero rounded(ScaleZero sz, MetadataDtype metadata) {
  return {.scale = round_to_metadata(sz.scale, metadata),
          .zero = round_to_metadata(sz.zero, metadata) + 0.0f};  // -0 becomes +0
}

int code_under(const CodecRules& rules, float x, ScaleZero sz) {
  const float t = rules.zero == ZeroForm::kCodeUnits ? add_rn(div_rn(x, sz.scale), sz.zero)
                                                     : div_rn(sub_rn(x, sz.zero), sz.scale);
  // Of the three ties .5, 1.5, 2.5 the first and the last have an even neighbour below.
  if (rules.ties == CodeTies::kEven) return (t > 0.5f) + (t >= 1.5f) + (t > 2.5f);
  const float up = add_rn(t, 0.5f);
  return (up >= 1.0f) + (up >= 2.0f) + (up >= 3.0f);
}

}  // namespace

const char* rule_name(ClipSpan span) { return name_in(kSpans, span); }
const char* rule_name(ZeroForm zero) { return name_in(kZeros, zero); }
const char* rule_name(CodeTies ties) { return name_in(kTies, ties); }
const char* rule_name(MetadataRounding rounding) { return name_in(kRoundings, rounding); }
bool parse_rule(const std::string& name, ClipSpan& span) { return find_in(kSpans, name, span); }
bool parse_rule(const std::string& name, ZeroForm& zero) { return find_in(kZeros, name, zero); }
bool parse_rule(const std::string& name, CodeTies& ties) { return find_in(kTies, name, ties); }
bool parse_rule(const std::string& name, MetadataRounding& rounding) {
  return find_in(kRoundings, name, rounding);
}

bool write_and_read_group(const CodecRules& rules, MetadataDtype metadata, const float* x, int size,
                          float threshold, float* x_hat) {
  const auto [lo, hi] = std::minmax_element(x, x + size);
  const ScaleZero exact =
      exact_scale_and_zero(rules, metadata, std::clamp(*lo, -threshold, threshold),
                           std::clamp(*hi, -threshold, threshold));
  const ScaleZero stored = rounded(exact, metadata);
  if (!is_finite(stored.scale) || !is_finite(stored.zero)) return false;
  const bool before = rules.metadata_rounding == MetadataRounding::kBeforeCoding;
  for (int i = 0; i < size; ++i) {
    const int code = code_under(rules, x[i], before ? stored : exact);
    x_hat[i] = rules.zero == ZeroForm::kCodeUnits
                   ? dequantize(code, stored)
                   : add_rn(mul_rn(static_cast<float>(code), stored.scale), stored.zero);
  }
  return true;
}

}  // namespace oscar
