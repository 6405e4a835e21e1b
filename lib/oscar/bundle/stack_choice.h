// The choices of a calibration, limited to what one serving stack runs.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "oscar/bundle/stacks.h"
#include "oscar/fit/search_options.h"

namespace oscar {

// What is fixed, what is left to held-out loss, and the codec.
struct StackChoice {
  FitOptions fit;
  SearchOptions search;
  QuantizerSettings quantizer;  // quant_group_size 0 = head_dim
};

// Options that were given on the command line and name a value (or a search) that must be kept,
// with that word: {"--rounding", "shaped"}.
using NamedOptions = std::map<std::string, std::string>;

// Replaces what `stack` does not serve by what it does and closes searches that have one outcome
// left. The search chooses transforms and clipping ratios for each KV head: where the stack takes
// one transform a layer, or fewer ratios, they are not searched. Then the fixed transform stands,
// and the published pair (for one ratio, the published one of keys). Means are taken off keys and
// values or off neither, so a stack that has a place for one of them only gets neither. Throws
// Error, with the option in `where`: the stack's codec is not this toolkit's, or a named option
// asks for what it does not serve.
StackChoice restrict_to(const Stack& stack, StackChoice choice, const NamedOptions& named);

// In a few words each: "one transform a layer", "plain rounding", ...
std::vector<std::string> describe_choice(const StackChoice& choice);

}  // namespace oscar
