// The report as JSON and as a table.
#pragma once

#include <optional>
#include <vector>

#include "oscar/base/json.h"
#include "oscar/eval/estimate.h"
#include "oscar/eval/methods.h"
#include "oscar/eval/needles.h"
#include "oscar/eval/session.h"

namespace oscar {

// From measurements to the JSON report; SCHEMA.md describes every key.

struct TextResults {
  int64_t first_position = 0, longest = 0;      // longest sequence in tokens
  std::vector<int64_t> measured = {};           // predicted tokens of each sequence
  bool one_text = false;                        // the sequences continue each other
  double repeated_share = 0;                    // of the text (text/repeats.h)
  std::vector<TokenScores> scores = {};         // [methods]
  std::vector<OutputError> output_errors = {};  // [methods]
};

struct NeedleResults {
  std::vector<NeedlePrompt> prompts;
  std::string chat_template = "none";              // ChatTemplate::name, of the prompts
  std::vector<std::vector<NeedleOutcome>> forced;  // [methods][prompts]
  std::vector<std::vector<bool>> generated;        // the same, or empty
};

// Starts report["methods"]. methods[0] is the reference.
void describe_methods(const std::vector<Method>& methods, Json& report);
// `judged`: the method whose KL is set against that of each other one, if there is one.
void add_text_results(const TextResults& results, const std::vector<Method>& methods,
                      std::optional<size_t> judged, uint64_t seed, Json& report);
// KL and NLL of every method in each resampling unit, for comparisons that the report leaves out.
void add_unit_results(const TextResults& results, const std::vector<Method>& methods, Json& report);
void add_needle_results(const NeedleResults& results, const std::vector<Method>& methods,
                        Json& report);

}  // namespace oscar
