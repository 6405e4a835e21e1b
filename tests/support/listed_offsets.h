// The mean phase of offsets written out one by one: what closed forms are judged by.
#pragma once

#include <utility>
#include <vector>

#include "oscar/fit/moments.h"

namespace oscar_test {

// Over the given offsets, at least one.
inline oscar::MeanPhase mean_phase_of_offsets(std::vector<double> offsets) {
  return [offsets = std::move(offsets)](double omega) {
    std::complex<double> sum = 0;
    for (const double p : offsets) sum += std::polar(1.0, omega * p);
    return sum / static_cast<double>(offsets.size());
  };
}

}  // namespace oscar_test
