// From per-token numbers to a mean with its uncertainty, and tests that compare two methods
// (math 11.5, 11.6).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace oscar {

inline constexpr int64_t kFewestTokens = 100;  // figures on fewer are refused

// Units that are drawn as a whole when uncertainty is estimated, because the tokens of one text
// depend on each other: the sequences, or, when there are fewer than kFewestUnits, stretches of
// kUnitTokens measured tokens within them. Returns the unit of each measured token.
inline constexpr int64_t kFewestUnits = 8;
inline constexpr int64_t kUnitTokens = 512;
std::vector<int32_t> make_units(const std::vector<int64_t>& tokens_of_sequence);

// Mean over tokens and its standard error from the spread between units (ratio estimator; NaN with
// one unit).
struct Estimate {
  double mean = 0, se = 0;
};
Estimate estimate(const std::vector<double>& values, const std::vector<int32_t>& units);

// Mean of a - b over tokens and the 95% interval of a bootstrap that draws units with replacement.
struct PairedDifference {
  double mean = 0, low = 0, high = 0;
};
PairedDifference paired_bootstrap(const std::vector<double>& a, const std::vector<double>& b,
                                  const std::vector<int32_t>& units, uint64_t seed,
                                  int replicates = 2000);

// Quantiles (0..1), linear between order statistics. `values` must not be empty.
std::vector<double> quantiles(std::vector<double> values, const std::vector<double>& levels);

// 95% Wilson interval of a pass rate; trials > 0.
std::pair<double, double> wilson_interval(int64_t passes, int64_t trials);

// Two-sided exact McNemar test: probability of a split at least as uneven as (only_a, only_b) of
// the cases on which two methods disagree. 1 when they never do.
double mcnemar_exact(int64_t only_a, int64_t only_b);

// Throws Error when fewer than kFewestTokens are measured; `what` names the figure.
void require_enough_tokens(int64_t tokens, const std::string& what);

}  // namespace oscar
