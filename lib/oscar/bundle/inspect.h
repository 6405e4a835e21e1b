// What a bundle is and holds, as JSON and as text of 80 columns.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/bundle/backend_plan.h"

namespace oscar {

struct Inspection {
  Json json;
  std::vector<BackendPlan> backends;  // also in `json`; empty without transforms
};

// Everything below as plain data. Works on bundles, statistics files and checkpoints. Layers carry
// by head kind, clip ratio, scale correction, rounding, share of the largest eigenvalue (of the
// sum), condition number and predicted loss; bits per element at 8K, 32K and 128K tokens follow
// from the quantizer. `evaluation`: a report of oscar-eval on the bundle, whose measured KL says
// what backends lose; without it the stored one. Throws Error for a file that cannot be read.
Inspection inspect_bundle(const std::filesystem::path& path,
                          const std::optional<Json>& evaluation = std::nullopt);

// The same for people: what fits a screen, or all of it. Control characters in the file's texts are
// shown as '?'.
enum class InspectionView { kScreen, kAll };
std::string inspection_text(const Inspection& inspection, InspectionView view);

}  // namespace oscar
