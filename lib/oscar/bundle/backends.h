// What each backend takes, and what it can run of a bundle.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/bundle/bundle.h"
#include "oscar/cache/codec.h"
#include "oscar/fit/fit.h"

namespace oscar {

// Backends: what each can take of a fit, as one table (transforms, codec, clipping, windows),
// and a calibration narrowed to one of them. backend_plan.h says what a backend runs of a bundle.

enum class WindowBasis { kTransformed, kOriginal };  // of the exact rows

// A dtype of scale and zero, and when they are rounded to it (fp32: not at all).
struct BackendMetadata {
  MetadataDtype dtype = MetadataDtype::kFp32;
  MetadataRounding rounding = MetadataRounding::kBeforeCoding;
  bool whole_head_only = false;  // of the quantization group
};

// Facts read in public sources, named in `source`; a fact that could not be read is left at what is
// certain to be served.
struct Backend {
  const char* name;     // of --for
  const char* summary;  // the server and where it reads transforms from
  const char* source;
  // What runs its files and what was seen of that: the first words of an export. Null for a backend
  // that has none.
  const char* standing = nullptr;

  // Transforms. A backend of per-head matrices can be given one matrix for all heads.
  bool per_head = false;
  bool key_partner = false;    // q_rotation: keys need not be orthogonal
  bool value_partner = false;  // o_rotation: values need not be
  bool key_mean = false, value_mean = false;
  bool key_centers = false;      // two a segment of positions, named by the sign of a scale
  bool transposed_file = false;  // stores R^T

  // Writer.
  bool shaped_rounding = false, scale_correction = false;
  std::vector<int> quant_group_sizes;     // 0: head_dim
  std::vector<BackendMetadata> metadata;  // the default first
  CodecRules rules = {};                  // but for metadata_rounding, which `metadata` has
  // Codes by mean and spread of each 128 values between fixed thresholds: `rules` say nothing.
  bool own_levels = false;
  PackOrder packing = PackOrder::kConsecutive;
  ClipScope clip = ClipScope::kModel;

  // Cache and model.
  WindowBasis windows = WindowBasis::kTransformed;
  int window_multiple = 1;  // of sink and recent tokens
  int head_dim_multiple = 4, largest_head_dim = kMaxHeadDim;
  bool power_of_two_head = false;
  bool other_layers = false;               // beside full attention: windows in BF16, no rows at all
  std::vector<std::string> architectures;  // empty: any
};

const std::vector<Backend>& backends();

// What to tell a user who names a server and means one of two backends ("vllm", "transformers",
// "oscar"): who serves it, and what the other is called. None for other names.
std::optional<ErrorInfo> answer_to(std::string_view name);

// Throws UsageError: the answer above, or a list of the names when there is none of this name.
const Backend& find_backend(std::string_view name);

// Why codes, scale or zero would come out different from those of a codec with these settings
// (quant_group_size 0: head_dim), as "it stores the row's minimum, not a zero point"; "" when they
// do not.
std::string codec_gap(const Backend& backend, const CacheFormat& quantizer);

// Gives settings of the backend's group size and metadata dtype the rules that the backend has for
// them. Leaves them alone when it has no such metadata or levels of its own.
void take_rules_of(const Backend& backend, CacheFormat& quantizer);

// The backend's first quantization group size and metadata dtype, and its rules; the rest as here.
CacheFormat default_codec(const Backend& backend);

// The first of a backend's `sizes` (not empty) that divides a head, as 0, the whole head, always
// does; where none does, the first, which is then refused as any other that does not divide.
int group_size_for(const std::vector<int>& sizes, int head_dim);

// Whether oscar-calibrate --for takes it: its codec is one of those that codec.h describes.
bool is_served(const Backend& backend);

// "sglang-v1, sglang-v2" and the like, of backends that are served or are not.
std::string backend_names(bool served);

// Narrows what a calibration fixes and searches to what one backend runs.

struct BackendChoice {
  FitOptions fit;         // what is fixed
  SearchOptions search;   // what held-out loss chooses instead
  CacheFormat quantizer;  // the codec and its windows; quant_group_size 0 = head_dim
  // Not empty: group_size_for a head, of these, takes the place of quant_group_size.
  std::vector<int> quant_group_sizes = {};
};

// Options of the command line that may not be overruled, with the word given for each:
// {"--rounding", "shaped"}. "auto" overrules nothing, so it is not among them.
using NamedOptions = std::map<std::string, std::string>;

// `choice` with all that `backend` does not serve replaced or closed:
//   transform   shared matrices for one transform a layer; OSCAR's rotation for the balanced
//               transform without a place for its inverse; neither mean without a place for both
//   clipping    as many ratios as it has, searched from the published pair on; for one ratio, from
//               that of keys
//   writer      plain rounding, no scale correction
//   codec       the backend's rules, its first metadata dtype and, where the quantization group
//   size
//               is none of its own, its sizes to choose from by head_dim
// The search's fallback, of which no backend was asked, goes where anything of the fit was
// replaced. A search stays open only where more than one outcome is served. It chooses transforms
// for each KV head, so it never does for a backend with one a layer.
//
// Throws Error, with the option in `where`: the backend is not served (is_served), a named option
// asks for what it does not serve, or sink or recent tokens are no multiple of its window_multiple.
BackendChoice restrict_to(const Backend& backend, BackendChoice choice, const NamedOptions& named);

}  // namespace oscar
