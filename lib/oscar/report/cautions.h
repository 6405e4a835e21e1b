// What keeps figures from being taken at their word: lines of the verdict on the page, in the
// terminal and on the model card. scripts/publish.sh refuses them by name.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"

namespace oscar {

// Shares above this are cautioned of. Text that the fit or the search has seen is quantized better
// than other text; a hundredth of such text changes KL by at most a hundredth of that advantage,
// which no evaluation resolves, and set phrases that unrelated texts share stay below it.
inline constexpr double kNotableOverlap = 0.01;

struct Caution {
  // "shared-text": calibration and evaluation share text. "little-text": the calibration text is
  // not enough. "portable": the portable variant loses kTooManyTimes as much or more.
  std::string kind;
  std::string method;    // whose figures: "bundle", or the name of a further bundle
  std::string measured;  // "37% of its 13-grams"
  std::string sentence;  // all of it, without a full stop
};

// Of a report of oscar-eval (eval/SCHEMA.md) of any shape: what cannot be read is left out.
std::vector<Caution> cautions_of(const Json& report);

// Of the convergence record of a bundle (bundle/SCHEMA.md) that people know as `file`.
std::optional<Caution> little_text(const Json& record, const std::string& method,
                                   const std::string& file);

}  // namespace oscar
