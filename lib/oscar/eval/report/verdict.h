// Whether a 2-bit cache is usable with the judged method, in words, with the limits it was held to.
#pragma once

#include <string>
#include <vector>

#include "oscar/eval/report/report_data.h"

namespace oscar {

enum class Standing { kClose, kCare, kLost, kUnknown };

struct Check {
  std::string what;           // what is compared
  std::string measured = {};  // the figure, with what it is compared with
  std::string limits;         // "close: ...; with care: ..."
  Standing standing = Standing::kUnknown;
  std::string note = {};    // what the figure can't show; may be empty
  bool is_caution = false;  // the note is that of a caution, which is said beside the checks too
};

struct Verdict {
  const MethodFigures* judged = nullptr;   // into the data; null: only bf16 or exact were compared
  Standing standing = Standing::kUnknown;  // the worst of the checks that were measured
  std::string headline;
  std::vector<std::string> sentences;
  std::string beside_fp8;  // KL over an FP8 cache on the same text; "" where it was not measured
  std::vector<Check> checks;
  std::vector<std::string> not_measured;
};

// The method that a report is about: "bundle", else the first bundle with a name of its own, else
// the last method that is no variant, bf16 or exact. Null when nothing at INT2 was compared.
const MethodFigures* judged_method(const ReportData& data);

// The published OSCAR recipe of this comparison with the smallest divergence; null when there is
// none or it is the judged method itself.
const MethodFigures* published_method(const ReportData& data);

// Plain text throughout: the page escapes it.
Verdict judge(const ReportData& data);

}  // namespace oscar
