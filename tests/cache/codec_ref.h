// Double-precision oracles of the codec's losses; they judge error, not bytes.
#pragma once

#include <cstdint>
#include <vector>

namespace oscar_test {

// Factors M + damping * mean(diag M) I = U D U^T; returns U [d, d], unit upper triangular.
inline std::vector<double> feedback_ref(const std::vector<double>& metric, int d, double damping) {
  std::vector<double> a = metric, u(metric.size(), 0.0);
  double mean = 0.0;
  for (int i = 0; i < d; ++i) mean += metric[i * d + i] / d;
  for (int i = 0; i < d; ++i) a[i * d + i] += damping * mean;
  for (int k = d - 1; k >= 0; --k) {  // peel off the last column
    const double pivot = a[k * d + k];
    for (int i = 0; i <= k; ++i) u[i * d + k] = a[i * d + k] / pivot;
    for (int i = 0; i < k; ++i) {
      for (int j = 0; j < k; ++j) a[i * d + j] -= u[i * d + k] * u[j * d + k] * pivot;
    }
  }
  return u;
}

// e M e^T with e = y - x.
inline double metric_loss(const float* x, const float* y, const std::vector<double>& metric,
                          int d) {
  double loss = 0.0;
  for (int i = 0; i < d; ++i) {
    for (int j = 0; j < d; ++j) {
      loss += (static_cast<double>(y[i]) - x[i]) * metric[i * d + j] *
              (static_cast<double>(y[j]) - x[j]);
    }
  }
  return loss;
}

}  // namespace oscar_test
