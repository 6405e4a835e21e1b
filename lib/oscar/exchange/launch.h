// What a server must be told so that it runs an export: its README.
#pragma once

#include <optional>
#include <string>

#include "oscar/bundle/bundle.h"
#include "oscar/exchange/formats.h"
#include "oscar/stacks/plan.h"

namespace oscar {

inline constexpr const char* kLaunchName = "README.md";

// Markdown. `plan` is absent for plain arrays. `in_model`: the files are a whole model's.
std::string launch_text(const Bundle& bundle, const ExchangeFormat& format,
                        const std::optional<StackPlan>& plan, bool in_model);

}  // namespace oscar
