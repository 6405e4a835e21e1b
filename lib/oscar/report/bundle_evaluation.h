// A stored evaluation, and whether it is one of a given bundle.
#pragma once

#include <string>

#include "oscar/bundle/bundle.h"
#include "oscar/report/report_data.h"

namespace oscar {

struct BundleEvaluation {
  std::string file;  // its name, for people
  ReportData data;
  std::string tool;  // "0.1.0 (commit)", of the program that measured

  const MethodFigures& measured() const { return *data.find("bundle"); }
};

// Throws Error naming `file` and what differs unless `report` (eval/SCHEMA.md) is one of `bundle`:
// method "bundle" over the same content, or content that is served alike (serving_sha256), for the
// same weights, with the bundle's own row format and windows.
BundleEvaluation evaluation_of(const Bundle& bundle, const Json& report, const std::string& file);

}  // namespace oscar
