// The named recipes: every default of the fit in one table.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "oscar/fit/fit.h"
#include "oscar/fit/search_options.h"

namespace oscar {

struct Preset {
  const char* name;
  const char* summary;  // one line for --help
  FitOptions fit;       // position_span -1 = every position the model serves
  // What held-out loss chooses instead of `fit`, and what it chooses when asked for all or where a
  // serving stack takes less than `fit`.
  SearchOptions search, full_search;
};

// "best" (default), "paper" (arXiv 2605.17757) and "released" (the published v1 files).
const std::vector<Preset>& presets();

// Throws Error listing the names when there is none of this name.
const Preset& find_preset(std::string_view name);

// Names as used on the command line and in the bundle. A composition is the bundle's word for the
// product that the kind stands for: t_h also where shaped rounding puts another mixing matrix in
// the place of H (balanced_fit.h).
const char* method_name(TransformKind kind);            // balanced, oscar, hadamard, identity
const char* composition_name(TransformKind kind);       // t_h, r_h_pbr, h, identity
const char* objective_name(ValueObjective objective);   // sv, energy
const char* granularity_name(Granularity granularity);  // per-head, shared
const char* row_weights_name(RowWeights weights);       // even, attention
const char* key_centres_name(bool two);                 // one, two
const char* scale_correction_name(ScaleCorrection correction);  // none, unbiased, metric
const char* rounding_name(Rounding rounding);                   // shaped, plain

// A clipping ratio in words: "0.96", or "off" for 0.
std::string clip_text(double ratio);

}  // namespace oscar
