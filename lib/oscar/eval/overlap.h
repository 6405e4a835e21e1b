// Leakage guard: how much of an evaluation's text a bundle was made from.
#pragma once

#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/data/ngram_fingerprint.h"

namespace oscar {

// Shares above this are warned of. Text that the fit or the search has seen is quantized better
// than other text; a hundredth of such text changes KL by at most a hundredth of that advantage,
// which no evaluation resolves, and set phrases that unrelated texts share stay below it.
inline constexpr double kNotableOverlap = 0.01;

// Entry `overlap` of a bundle in the report (SCHEMA.md). Of `chunks` those with more than
// `first_position` tokens were evaluated: with needle tasks, whose haystack is all text, any.
Json overlap_json(const NgramFingerprint& fingerprint,
                  const std::vector<std::vector<int32_t>>& chunks, int64_t first_position);

// One sentence for each bundle of the report whose overlap is notable: the share, and not by chance
// (the interval's lower end), is above kNotableOverlap.
std::vector<std::string> overlap_warnings(const Json& report);

}  // namespace oscar
