// What decode attention gave on the GPU, judged by float64 attention over the same rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/device_memory.h"
#include "kernels/random_cache.h"
#include "oscar/cache/pages.h"

namespace oscar_test {

// Output is bf16, whose rounding alone is 1.7e-3 of a row: all of the output stays within 2e-3, and
// what goes beyond the rounding interval of each value, the kernel's own part, within 1e-3 a row.
inline constexpr double kOutputBound = 2e-3, kOwnBound = 1e-3, kLseBound = 1e-3;

// Half the distance between bf16 values around x.
inline double half_step(double x) {
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(1.0, exponent - 9);
}

struct Outcome {
  std::vector<uint16_t> o;
  std::vector<float> lse;
};

struct Reference {
  explicit Reference(const oscar::AttentionParams& p)
      : d(p.format.head_dim),
        o(static_cast<size_t>(p.batch) * p.q_len * p.num_qo_heads * d),
        lse(o.size() / d) {
    decode_attention_ref(p, o.data(), lse.data());
  }
  explicit Reference(RandomCache& host) : Reference(host.host_params()) {}
  int d;
  std::vector<double> o, lse;
};

// Relative error of the whole output, and largest error of lse; fails on a row whose error beyond
// bf16 rounding is too large.
inline void compare(const Reference& reference, const Outcome& outcome, double* output_error,
                    double* lse_error) {
  const auto& [d, o, lse] = reference;
  double difference = 0.0, norm = 0.0;
  *lse_error = 0.0;
  for (size_t row = 0; row < lse.size(); ++row) {
    double own = 0.0, row_norm = 0.0;
    for (int i = 0; i < d; ++i) {
      const double x = oscar::bf16_to_float(outcome.o[row * d + i]);
      ASSERT_TRUE(std::isfinite(x)) << "row " << row << " dim " << i;
      const double expected = o[row * d + i];
      const double beyond = std::max(0.0, std::fabs(x - expected) - half_step(expected));
      own += beyond * beyond;
      row_norm += expected * expected;
      difference += (x - o[row * d + i]) * (x - o[row * d + i]);
      norm += o[row * d + i] * o[row * d + i];
    }
    ASSERT_LE(std::sqrt(own), kOwnBound * std::sqrt(row_norm)) << "row " << row;
    if (std::isinf(lse[row])) {
      ASSERT_EQ(outcome.lse[row], lse[row]);
    } else {
      const double error = std::fabs(outcome.lse[row] - lse[row]);
      ASSERT_TRUE(std::isfinite(error)) << "row " << row;
      *lse_error = std::max(*lse_error, error / std::max(1.0, std::fabs(lse[row])));
    }
  }
  *output_error = norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}
inline void compare(RandomCache& host, const Outcome& outcome, double* output_error,
                    double* lse_error) {
  compare(Reference(host), outcome, output_error, lse_error);
}

}  // namespace oscar_test
