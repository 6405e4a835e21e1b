// A few plain numbers that say how concentrated a moment is (math 2.5); for inspection and reports.
#pragma once

#include <string>

#include "oscar/linalg/tensor.h"

namespace oscar {

// Of eigenvalues l_i (negative ones count as zero) with shares p_i = l_i / sum l.
struct SpectrumSummary {
  double trace = 0;                   // sum of l
  double largest = 0;                 // max l
  double top_share = 0;               // max p
  double effective_rank = 0;          // exp(-sum p ln p), 1 .. d (Roy and Vetterli 2007)
  double participation_ratio = 0;     // (sum l)^2 / sum l^2, 1 .. d
  int rank = 0;                       // eigenvalues above d * epsilon * the largest
  int dimension = 0;                  // d
  int dimensions_for_99_percent = 0;  // fewest directions that hold 99% of the trace
};

// `eigenvalues` [d] in ascending order. A spectrum without positive values gives zeros.
SpectrumSummary summarise_spectrum(const VectorD& eigenvalues);

// One line: "effective rank 37.2 of 128, participation 18.4, top share 12.1%, 99% in 88".
std::string describe(const SpectrumSummary& summary);

}  // namespace oscar
