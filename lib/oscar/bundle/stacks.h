// What each serving stack can take of a fit, as one table: transforms, codec, clipping, windows.
#pragma once

#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"
#include "oscar/cache/codec.h"

namespace oscar {

enum class ClipScope {
  kHead,      // a ratio for each layer, KV head and side
  kLayer,     // a ratio for each layer and side
  kModel,     // one ratio for all keys, one for all values
  kModelBoth  // one ratio
};
enum class ClipSpan { kHeadRow, kQuantGroup, kCentredBlock };  // whose magnitudes are ranked
enum class ZeroMeaning { kCodeUnits, kMinimum, kMeanAndSigma };
enum class CodeRounding { kHalfUp, kHalfToEven, kThresholds };
enum class WindowBasis { kTransformed, kOriginal };  // of the exact rows

// A dtype of scale and zero. Codes are found from the rounded values, as here, or from the values
// before rounding; fp32 is not rounded.
struct StackMetadata {
  MetadataDtype dtype = MetadataDtype::kFp32;
  bool rounded_before_coding = true;
  bool whole_head_only = false;  // of the quantization group
};

// Facts read in public sources, named in `source`; a fact that could not be read is left at what is
// certain to be served.
struct Stack {
  const char* name;     // of --for
  const char* summary;  // the server and where it reads transforms from
  const char* source;

  // Transforms. A stack of per-head matrices can be given one matrix for all heads.
  bool per_head = false;
  bool key_partner = false;    // q_rotation: keys need not be orthogonal
  bool value_partner = false;  // o_rotation: values need not be
  bool key_mean = false, value_mean = false;
  bool transposed_file = false;  // stores R^T

  // Writer.
  bool shaped_rounding = false, scale_correction = false;
  std::vector<int> quant_group_sizes;   // 0: head_dim
  std::vector<StackMetadata> metadata;  // the default first
  ZeroMeaning zero = ZeroMeaning::kCodeUnits;
  CodeRounding code_rounding = CodeRounding::kHalfUp;
  PackOrder packing = PackOrder::kConsecutive;
  ClipScope clip = ClipScope::kModel;
  ClipSpan clip_span = ClipSpan::kHeadRow;

  // Cache and model.
  WindowBasis windows = WindowBasis::kTransformed;
  int window_multiple = 1;  // of sink and recent tokens
  int head_dim_multiple = 4, largest_head_dim = kMaxHeadDim;
  bool power_of_two_head = false;
  bool sliding_layers = false;             // beside full attention
  std::vector<std::string> architectures;  // empty: any
};

const std::vector<Stack>& stacks();

// Throws Error listing the names when there is none of this name.
const Stack& find_stack(const std::string& name);

// Why codes, scale or zero would come out different from those of this toolkit's codec with these
// settings (quant_group_size 0: head_dim), as "it stores the row's minimum, not a zero point"; ""
// when they do not.
std::string codec_gap(const Stack& stack, const QuantizerSettings& quantizer);

// Whether the gap is in rounding alone, so that an error predicted here holds there.
bool same_levels(const Stack& stack);

// The stack's first quantization group size and metadata dtype; the rest as here.
QuantizerSettings default_codec(const Stack& stack);

// Whether oscar-calibrate --for takes it: with those settings there is no gap.
bool is_served(const Stack& stack);

// "sglang-v1, sglang-v2" and the like, of stacks that are served or are not.
std::string stack_names(bool served);

// The table for programs and for people, the latter in 80 columns.
Json stacks_json();
std::string stacks_text();

}  // namespace oscar
