// A bundle in the files of a serving stack.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"
#include "oscar/exchange/formats.h"
#include "oscar/stacks/plan.h"

namespace oscar {

struct ExportResult {
  std::optional<StackPlan> plan;   // absent for plain arrays
  std::vector<std::string> files;  // names in the folder
  size_t layers = 0;
};

// Writes the folder `to`, whole or not at all, with the files of `format`, the README of its server
// (launch.h) and oscar-export.json (manifest.h), and reads it back under the stack's rules before
// it appears. `from` names the bundle in errors. What the stack cannot run is refused with the
// reason, or, with `reduce` and where the bundle has one, replaced by its portable variant.
// `base`, for gguf-rot alone, is a GGUF model whose copy gets the tensors; empty: they stand alone.
// Throws Error also for a statistics file and when `to` exists.
ExportResult export_bundle(const Bundle& bundle, const std::string& from,
                           const ExchangeFormat& format, bool reduce,
                           const std::filesystem::path& to, const std::filesystem::path& base = {});

}  // namespace oscar
