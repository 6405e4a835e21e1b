// Where the plain writers of serving stacks differ: clip threshold, zero, ties, metadata.
#pragma once

#include <cstdint>

#include "oscar/cache/metadata.h"
#include "oscar/cache/rounded_arithmetic.h"

namespace oscar {

enum class ClipSpan : uint8_t { kHeadRow, kQuantGroup };  // whose magnitudes are ranked
enum class ZeroForm : uint8_t {
  kCodeUnits,  // zero = -lo / scale; x^ = (code - zero) scale
  kMinimum,    // zero = lo;          x^ = code scale + zero
};
enum class CodeTies : uint8_t { kUp, kEven };
// Scale and zero are rounded to the metadata dtype before codes are found from them, or after.
enum class MetadataRounding : uint8_t { kBeforeCoding, kAfterCoding };

// The defaults are this toolkit's codec (codec.h), which alone rounds with noise shaping and
// corrects scales. Under every rule lo and hi are the smallest and largest clipped value of a
// group and scale = (hi - lo) / 3.
struct CodecRules {
  ClipSpan clip_span = ClipSpan::kHeadRow;
  ZeroForm zero = ZeroForm::kCodeUnits;
  CodeTies ties = CodeTies::kUp;
  MetadataRounding metadata_rounding = MetadataRounding::kBeforeCoding;

  bool operator==(const CodecRules&) const = default;
};

// Names in bundles: "head_row", "quant_group"; "code_units", "minimum"; "up", "even";
// "before_coding", "after_coding". Parsing returns false for any other name.
const char* rule_name(ClipSpan span);
const char* rule_name(ZeroForm zero);
const char* rule_name(CodeTies ties);
const char* rule_name(MetadataRounding rounding);
bool parse_rule(const std::string& name, ClipSpan& span);
bool parse_rule(const std::string& name, ZeroForm& zero);
bool parse_rule(const std::string& name, CodeTies& ties);
bool parse_rule(const std::string& name, MetadataRounding& rounding);

// One quantization group written under `rules` and read back. x [size] finite, rows already rounded
// to bf16; `threshold` of the clipping, infinite for none. fp32 arithmetic in the written order,
// without contraction. x_hat [size]. False when the range does not fit the metadata dtype.
bool write_and_read_group(const CodecRules& rules, MetadataDtype metadata, const float* x, int size,
                          float threshold, float* x_hat);

}  // namespace oscar
