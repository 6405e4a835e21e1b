// Entropy, participation and shares of an eigenvalue spectrum.
#include "oscar/fit/spectrum.h"

#include <fmt/format.h>

#include <cmath>

#include "oscar/linalg/symmetric.h"

namespace oscar {

SpectrumSummary summarise_spectrum(const VectorD& eigenvalues) {
  SpectrumSummary s;
  s.dimension = static_cast<int>(eigenvalues.size());
  const VectorD positive = eigenvalues.cwiseMax(0.0);
  s.trace = positive.sum();
  if (!(s.trace > 0)) return s;
  s.rank = numerical_rank(eigenvalues);
  s.largest = positive.maxCoeff();
  s.top_share = s.largest / s.trace;
  const VectorD shares = positive / s.trace;
  double entropy = 0;
  for (const double p : shares) entropy -= p > 0 ? p * std::log(p) : 0.0;
  s.effective_rank = std::exp(entropy);
  s.participation_ratio = 1 / shares.squaredNorm();
  double held = 0;
  for (int i = s.dimension - 1; i >= 0 && held < 0.99; --i) {
    held += shares[i];
    ++s.dimensions_for_99_percent;
  }
  return s;
}

std::string describe(const SpectrumSummary& s) {
  if (!(s.trace > 0)) return fmt::format("no energy in {} dimensions", s.dimension);
  return fmt::format(
      "effective rank {:.1f} of {}, participation {:.1f}, top share {:.1f}%, 99% in {}",
      s.effective_rank, s.dimension, s.participation_ratio, 100 * s.top_share,
      s.dimensions_for_99_percent);
}

}  // namespace oscar
