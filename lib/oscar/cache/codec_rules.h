// The choices in which plain writers differ (math 4.6), and their names; codec.h says what each
// means.
#pragma once

#include <string>

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

}  // namespace oscar
