// Narrows what a calibration fixes and searches to what one serving stack runs.
#pragma once

#include <map>
#include <string>

#include "oscar/fit/search_options.h"
#include "oscar/stacks/stack.h"

namespace oscar {

struct StackChoice {
  FitOptions fit;               // what is fixed
  SearchOptions search;         // what held-out loss chooses instead
  QuantizerSettings quantizer;  // the codec and its windows; quant_group_size 0 = head_dim
  // Not empty: group_size_for a head, of these, takes the place of quant_group_size.
  std::vector<int> quant_group_sizes = {};
};

// Options of the command line that may not be overruled, with the word given for each:
// {"--rounding", "shaped"}. "auto" overrules nothing, so it is not among them.
using NamedOptions = std::map<std::string, std::string>;

// `choice` with all that `stack` does not serve replaced or closed:
//   transform   shared matrices for one transform a layer; OSCAR's rotation for the balanced
//               transform without a place for its inverse; neither mean without a place for both
//   clipping    as many ratios as it has, searched from the published pair on; for one ratio, from
//               that of keys
//   writer      plain rounding, no scale correction
//   codec       the stack's rules, its first metadata dtype and, where the quantization group size
//               is none of its own, its sizes to choose from by head_dim
// The search's fallback, of which no stack was asked, goes where anything of the fit was replaced.
// A search stays open only where more than one outcome is served. It chooses transforms for each KV
// head, so it never does for a stack with one a layer.
//
// Throws Error, with the option in `where`: the stack is not served (is_served), a named option
// asks for what it does not serve, or sink or recent tokens are no multiple of its window_multiple.
StackChoice restrict_to(const Stack& stack, StackChoice choice, const NamedOptions& named);

}  // namespace oscar
