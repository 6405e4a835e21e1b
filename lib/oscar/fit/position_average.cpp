// Closed forms of the position average (math 8.2), one pair of RoPE dimensions against another.
//
// The pair (i, i + rotary_dim / 2) of a row x is the complex number z_i = x_i + i x_{i + half};
// row x D(p) has z_i e^{i theta_i p}. So z_i conj(z_j) turns by theta_i - theta_j and z_i z_j by
// theta_i + theta_j, and the four real products of two pairs follow from these two.
#include "oscar/fit/position_average.h"

#include <cmath>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/cache/key_centres.h"

namespace oscar {
namespace {

using Complex = std::complex<double>;
constexpr int kFewestOffsets = 64;

void require_fitting_rope(const Rope& rope, int d) {
  const int frequencies = static_cast<int>(rope.inv_freq.size());
  if (rope.rotary_dim < 0 || rope.rotary_dim > d || rope.rotary_dim != 2 * frequencies) {
    throw Error({.what = "the rotary embedding does not fit the head",
                 .expected = "rotary_dim of at most head_dim " + std::to_string(d) +
                             ", with rotary_dim / 2 frequencies",
                 .found = "rotary_dim " + std::to_string(rope.rotary_dim) + " with " +
                          std::to_string(frequencies) + " frequencies"});
  }
}

// Mean of exp(i omega n step) over n = 0 .. count - 1.
Complex geometric_mean_phase(double omega, int64_t count, double step) {
  const double half = 0.5 * omega * step;
  const double denominator = std::sin(half);
  if (denominator == 0.0) return {1.0, 0.0};
  const double n = static_cast<double>(count);
  const double magnitude = std::sin(n * half) / (n * denominator);
  return std::polar(1.0, (n - 1) * half) * magnitude;
}

}  // namespace

MeanPhase mean_phase_of_span(int64_t span) {
  assert(span >= 0);
  const int64_t count = span + 1 >= kFewestOffsets ? span + 1 : kFewestOffsets;
  const double step = static_cast<double>(span) / static_cast<double>(count - 1);
  return [count, step](double omega) { return geometric_mean_phase(omega, count, step); };
}

MeanPhase mean_phase_of_served(int64_t span) {
  const MeanPhase all = mean_phase_of_span(span);
  const MeanPhase early =
      mean_phase_of_span(static_cast<int64_t>(kEarlyPart * static_cast<double>(span)));
  return [all, early](double omega) {
    return kEarlyShare * early(omega) + (1 - kEarlyShare) * all(omega);
  };
}

MeanPhase mean_phase_of_segments(int64_t span) {
  assert(span >= 0);
  const int64_t count = span / kSegmentTokens + 1;
  const auto early_count =
      std::max<int64_t>(1, std::llround(kEarlyPart * static_cast<double>(count)));
  const auto mean = [](int64_t segments) {
    return [segments](double omega) {
      return geometric_mean_phase(omega, segments, kSegmentTokens) *
             std::polar(1.0, omega * segment_middle(0));
    };
  };
  return [all = mean(count), early = mean(early_count)](double omega) {
    return kEarlyShare * early(omega) + (1 - kEarlyShare) * all(omega);
  };
}

double segment_phase(double omega) {
  const Complex mean = geometric_mean_phase(omega, kSegmentTokens, 1.0);
  return (mean * std::polar(1.0, -omega * segment_middle(0))).real();
}

double segment_middle(int64_t segment) {
  return static_cast<double>(segment * kSegmentTokens) + 0.5 * (kSegmentTokens - 1);
}

MeanPhase phase_at(double position) {
  return [position](double omega) { return std::polar(1.0, omega * position); };
}

double served_position(double share, int64_t span) {
  constexpr double kUpToEarly = kEarlyShare + (1 - kEarlyShare) * kEarlyPart;
  const double part = share < kUpToEarly
                          ? share / kUpToEarly * kEarlyPart
                          : kEarlyPart + (share - kUpToEarly) / (1 - kUpToEarly) * (1 - kEarlyPart);
  return part * static_cast<double>(span);
}

MatrixD average_moment(const MatrixD& moment, const Rope& rope, const MeanPhase& mean_phase) {
  const int d = static_cast<int>(moment.rows());
  require_fitting_rope(rope, d);
  const int half = rope.rotary_dim / 2;
  MatrixD averaged = moment;
  for (int i = 0; i < half; ++i) {
    const int x = i, y = i + half;
    for (int j = 0; j <= i; ++j) {
      const int u = j, w = j + half;
      const double xu = moment(x, u), xw = moment(x, w), yu = moment(y, u), yw = moment(y, w);
      const double theta = rope.inv_freq[i], other = rope.inv_freq[j];
      const Complex against = Complex(xu + yw, yu - xw) * mean_phase(theta - other);
      const Complex along = Complex(xu - yw, xw + yu) * mean_phase(theta + other);
      averaged(x, u) = averaged(u, x) = 0.5 * (against + along).real();
      averaged(y, w) = averaged(w, y) = 0.5 * (against - along).real();
      averaged(y, u) = averaged(u, y) = 0.5 * (along + against).imag();
      averaged(x, w) = averaged(w, x) = 0.5 * (along - against).imag();
    }
    const Complex turn = mean_phase(rope.inv_freq[i]);
    for (int r = rope.rotary_dim; r < d; ++r) {
      const Complex z = Complex(moment(x, r), moment(y, r)) * turn;
      averaged(x, r) = averaged(r, x) = z.real();
      averaged(y, r) = averaged(r, y) = z.imag();
    }
  }
  return averaged;
}

VectorD average_sum(const VectorD& sum, const Rope& rope, const MeanPhase& mean_phase) {
  require_fitting_rope(rope, static_cast<int>(sum.size()));
  const int half = rope.rotary_dim / 2;
  VectorD averaged = sum;
  for (int i = 0; i < half; ++i) {
    const Complex z = Complex(sum[i], sum[i + half]) * mean_phase(rope.inv_freq[i]);
    averaged[i] = z.real();
    averaged[i + half] = z.imag();
  }
  return averaged;
}

}  // namespace oscar
