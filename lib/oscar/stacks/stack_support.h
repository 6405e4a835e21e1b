// What each serving stack can run of a bundle: its own transforms, its portable variant, or
// nothing.
#pragma once

#include <string>

#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"

namespace oscar {

// A list with one object for each stack of stacks.h:
//   name            of the stack
//   verdict         "as is", "portable" or "cannot"
//   reason          of "portable": the first thing that keeps it from running the bundle's own
//                   transforms; of "cannot": why; "" for "as is"
//   variant         of "portable": "portable" or "portable-perhead", as in oscar-eval --compare
//   clip            of "portable", where the stack has one ratio for each side: [keys, values], the
//                   pair of least loss summed over layers, by the losses of the portable variant's
//                   search; without that record the published one. Null: the ratios as stored
//   relative_error  of "portable": predicted error of the attention output with that pair and this
//                   toolkit's codec, over that of the bundle's own transforms, each the sum of
//                   predicted_output_nmse over layers and heads. The losses of one pair scale the
//                   former from the pairs that the layers chose by themselves. Null: not known
//   line            all that in words, for a column of 68 characters
// `bundle` has transforms.
Json stack_support_json(const Bundle& bundle);

// A line for each stack, and what they mean.
std::string stack_support_text(const Json& support);

}  // namespace oscar
