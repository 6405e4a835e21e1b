// How far lists of numbers are apart, as the tests judge it.
#pragma once

#include <cmath>
#include <vector>

namespace oscar_test {

// |found - expected| / |expected|, Euclidean (Frobenius for matrices).
inline double relative_error(const std::vector<double>& found,
                             const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (found[i] - expected[i]) * (found[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace oscar_test
