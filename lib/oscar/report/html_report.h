// The HTML page of an evaluation: one file without scripts, fonts or anything from the network.
#pragma once

#include <string>

#include "oscar/base/json.h"
#include "oscar/report/answers.h"

namespace oscar {

// A page made of nothing but `report` (lib/oscar/eval/SCHEMA.md) and, where there are some, of
// `answers` with the bundle of the report: equal reports and answers give equal bytes.
// It is well-formed XML, holds its style and its pictures inline, and forbids itself scripts and
// requests by a content security policy. Texts of the report are escaped; sections whose data are
// missing are left out and named with the reason. Throws Error when `report` is not one,
// or `answers` are of another bundle.
std::string render_html_report(const Json& report, const Answers* answers = nullptr);

}  // namespace oscar
