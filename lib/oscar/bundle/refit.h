// A rotation bundle from statistics alone: everything that needs no model.
#pragma once

#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"

namespace oscar {

// The model's RoPE from its record, which holds every parameter; `name` is the file in errors.
Rope recorded_rope(const Bundle& input, const std::string& name);

struct RefitOptions {
  std::string preset = "best";  // recorded; `fit` already holds its values
  // position_span -1: as recorded in the input, where that is 0 all that the model serves
  FitOptions fit;
  QuantizerSettings quantizer;  // quant_group_size 0: head_dim
  bool keep_statistics = true;
};

// Transforms, metrics, fixed clipping ratios and the portable variant of every layer of `input`, a
// statistics file or a bundle with statistics; `name` is its file in errors. Nothing is searched,
// so no error is predicted; `search` keeps what the statistics leave out. Throws Error when
// statistics are missing, when the energy objective was not collected, or when the input does not
// say which positions are served.
Bundle refit_bundle(Bundle input, const RefitOptions& options, const std::string& name);

}  // namespace oscar
