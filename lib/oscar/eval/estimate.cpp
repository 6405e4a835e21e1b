// Standard errors over units, the bootstrap, and tests on counts.
#include "oscar/eval/estimate.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <random>

#include "oscar/base/error.h"

namespace oscar {
namespace {

struct UnitSums {
  std::vector<double> sum;
  std::vector<double> count;
};

template <typename Value>
UnitSums sums_by_unit(size_t tokens, const std::vector<int32_t>& units, Value value) {
  assert(units.size() == tokens);
  const int32_t last = tokens == 0 ? -1 : *std::max_element(units.begin(), units.end());
  UnitSums out{std::vector<double>(last + 1, 0.0), std::vector<double>(last + 1, 0.0)};
  for (size_t i = 0; i < tokens; ++i) {
    out.sum[units[i]] += value(i);
    out.count[units[i]] += 1;
  }
  return out;
}

}  // namespace

std::vector<int32_t> make_units(const std::vector<int64_t>& tokens_of_sequence) {
  const bool whole = static_cast<int64_t>(tokens_of_sequence.size()) >= kFewestUnits;
  std::vector<int32_t> units;
  int32_t unit = -1;
  for (const int64_t tokens : tokens_of_sequence) {
    for (int64_t i = 0; i < tokens; ++i) {
      if (i == 0 || (!whole && i % kUnitTokens == 0)) ++unit;
      units.push_back(unit);
    }
  }
  return units;
}

Estimate estimate(const std::vector<double>& values, const std::vector<int32_t>& units) {
  const UnitSums sums = sums_by_unit(values.size(), units, [&](size_t i) { return values[i]; });
  const auto tokens = static_cast<double>(values.size());
  const auto count = static_cast<double>(sums.sum.size());
  Estimate out;
  for (const double sum : sums.sum) out.mean += sum;
  out.mean /= tokens;
  double squares = 0;
  for (size_t u = 0; u < sums.sum.size(); ++u) {
    const double residual = sums.sum[u] - sums.count[u] * out.mean;
    squares += residual * residual;
  }
  out.se = count > 1 ? std::sqrt(count / (count - 1) * squares) / tokens
                     : std::numeric_limits<double>::quiet_NaN();
  return out;
}

PairedDifference paired_bootstrap(const std::vector<double>& a, const std::vector<double>& b,
                                  const std::vector<int32_t>& units, uint64_t seed,
                                  int replicates) {
  assert(a.size() == b.size());
  const UnitSums sums = sums_by_unit(a.size(), units, [&](size_t i) { return a[i] - b[i]; });
  const size_t count = sums.sum.size();
  std::mt19937_64 random(seed);
  std::vector<double> means;
  for (int r = 0; r < replicates; ++r) {
    double sum = 0, tokens = 0;
    for (size_t draw = 0; draw < count; ++draw) {
      const size_t u = random() % count;
      sum += sums.sum[u];
      tokens += sums.count[u];
    }
    means.push_back(sum / tokens);
  }
  const auto interval = quantiles(means, {0.025, 0.975});
  double total = 0;
  for (const double sum : sums.sum) total += sum;
  return {total / static_cast<double>(a.size()), interval[0], interval[1]};
}

std::vector<double> quantiles(std::vector<double> values, const std::vector<double>& levels) {
  assert(!values.empty());
  std::sort(values.begin(), values.end());
  std::vector<double> out;
  for (const double level : levels) {
    const double place = level * static_cast<double>(values.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, values.size() - 1);
    const double part = place - static_cast<double>(below);
    out.push_back(values[below] + part * (values[above] - values[below]));
  }
  return out;
}

std::pair<double, double> wilson_interval(int64_t passes, int64_t trials) {
  constexpr double z = 1.959963984540054;
  const auto n = static_cast<double>(trials);
  const double p = static_cast<double>(passes) / n;
  const double centre = (p + z * z / (2 * n)) / (1 + z * z / n);
  const double half = z / (1 + z * z / n) * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
  return {std::max(0.0, centre - half), std::min(1.0, centre + half)};
}

double mcnemar_exact(int64_t only_a, int64_t only_b) {
  const int64_t n = only_a + only_b, k = std::min(only_a, only_b);
  double tail = 0;
  for (int64_t i = 0; i <= k; ++i) {
    tail += std::exp(std::lgamma(n + 1.0) - std::lgamma(i + 1.0) - std::lgamma(n - i + 1.0) -
                     static_cast<double>(n) * std::log(2.0));
  }
  return std::min(1.0, 2 * tail);
}

void require_enough_tokens(int64_t tokens, const std::string& what) {
  if (tokens >= kFewestTokens) return;
  throw Error({.what = "too few tokens for " + what,
               .expected = "at least " + std::to_string(kFewestTokens) +
                           " predicted tokens behind the first position",
               .found = std::to_string(tokens),
               .hint = "give a longer corpus or longer sequences (--chunk-len), or lower "
                       "--first-position"});
}

}  // namespace oscar
