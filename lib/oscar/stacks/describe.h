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
//   relative_error  of "portable" (plan.h). Null: not known
//   line            all that in words, for a column of 68 characters
Json plans_json(const std::vector<StackPlan>& plans);

// A line for each plan, and what they mean.
std::string plans_text(const std::vector<StackPlan>& plans);

}  // namespace oscar
