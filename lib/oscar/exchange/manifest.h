// oscar-export.json: what an export says of itself, so that it can be checked without the bundle.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"
#include "oscar/exchange/formats.h"
#include "oscar/exchange/transform_set.h"
#include "oscar/stacks/plan.h"

namespace oscar {

inline constexpr const char* kManifestName = "oscar-export.json";

// A row of numbers that no matrix of use maps onto itself or onto another head's: exact in bf16,
// neither symmetric nor constant. `which` gives another one.
std::vector<float> probe_row(int head_dim, int which);

// [d] (probe - mean) forward of one head, in float64.
std::vector<double> probe_image(const SideTransform& side, int head, const std::vector<float>& row);

// That image rounded to bf16, as the stack codes it.
struct ProbeCode {
  std::string codes, metadata;  // hex
  bool operator==(const ProbeCode&) const = default;
};
ProbeCode probe_code(const StackRun& run, const SideTransform& side, Side which);

// Objects and lists by key:
//   format, made_with, created_from {content_sha256, model, architecture, weights_fingerprint}
//   layers       global ids; heads_k, heads_v; head_dim_k, head_dim_v
//   variant      "own", "portable", "portable-perhead"; clip [keys, values] where there is one
//   pair;
//                relative_error where it is predicted; sink_tokens, recent_tokens,
//                quant_group_size, metadata_dtype
//   probe        {keys, values}: for each layer and head the first numbers of probe_image
//   row          {keys, values}: of the first layer and head, probe_code; null for levels of a
//                stack's own and for plain arrays
//   files        {name: sha256}
//
// begin_manifest has format, made_with and created_from.
Json begin_manifest(const Bundle& bundle, const char* format);
Json make_manifest(const Bundle& bundle, const ExchangeFormat& format,
                   const std::optional<StackPlan>& plan, const TransformSet& set,
                   const Json& files);

inline constexpr int kProbedNumbers = 4;

}  // namespace oscar
