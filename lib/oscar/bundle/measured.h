// What a bundle's evaluation measured, and whether that is of the cache that the bundle asks for.
#pragma once

#include <optional>
#include <string>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/bundle/bundle.h"

namespace oscar {

// What keeps the figures of a report of oscar-eval (eval/SCHEMA.md) from being those of a cache
// with the settings `own`, as an error without a place: another setting, other positions, or
// counted tokens that read no INT2 row. None where nothing does; what a report does not say is
// taken as the same.
std::optional<ErrorInfo> other_cache(const CacheFormat& own, const Json& report);

// Mean KL to BF16 of a bundle and of its portable variants, as one evaluation has them.
struct MeasuredKl {
  std::optional<double> own, shared, per_head;
  bool on_calibration_text = false;

  bool compares() const { return own && (shared || per_head); }
};

// Of a report of oscar-eval; what it has not compared is absent.
MeasuredKl measured_kl(const Json& report);
// Of the stored evaluation, unless it is of another cache.
MeasuredKl measured_kl(const Bundle& bundle);

// A sentence that says so of a stored evaluation that is of another cache; else "".
std::string left_out_evaluation(const Bundle& bundle);

}  // namespace oscar
