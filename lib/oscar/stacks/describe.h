// Table, choices and plans in words: JSON for programs, text of 80 columns for people.
#pragma once

#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/stacks/plan.h"
#include "oscar/stacks/restrict.h"
#include "oscar/stacks/stack.h"

namespace oscar {

// The table.
Json stacks_json();
std::string stacks_text();

// A few words for each part: "transform searched" or "balanced", "plain rounding", ...
std::vector<std::string> describe_choice(const StackChoice& choice);

// A list with one object for each plan:
//   name            of the stack
//   verdict         "as is", "portable" or "cannot"
//   reason          of "portable": the first thing that keeps it from running the bundle's own
//                   transforms; of "cannot": why; "" for "as is"
//   variant         of "portable": "portable" or "portable-perhead", as in oscar-eval --compare
//   clip            of "portable", where the stack has one ratio for each side: [keys, values].
//                   Null: the ratios as stored
//   relative_error  of "portable" (plan.h): predicted. Null: not known
//   kl_factor       of "portable" (plan.h): measured. Null: not measured
//   do_not_serve    kl_factor is kTooManyTimes or more
//   line            all that but the clip in words, for a column of 62 characters
Json plans_json(const std::vector<StackPlan>& plans);

// What a predicted error has been worth: KL measured over KL that was predicted, for the portable
// variants of three models (docs/serving.md).
inline constexpr const char* kPredictionWorth = "0.5 to 2.3 times";

// A line for each plan, and what they mean.
std::string plans_text(const std::vector<StackPlan>& plans);

}  // namespace oscar
