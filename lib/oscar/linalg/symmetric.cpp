// Functions of symmetric matrices on top of `eigh`.
#include "oscar/linalg/symmetric.h"

#include <cmath>
#include <limits>

namespace oscar {

VectorD raised_eigenvalues(const VectorD& values, double relative_floor) {
  const double largest = values.size() == 0 ? 0.0 : values.maxCoeff();
  const double floor = largest > 0 ? relative_floor * largest : relative_floor;
  return values.cwiseMax(floor);
}

MatrixD symmetric_power(const MatrixD& vectors, const VectorD& values, double exponent) {
  const VectorD powered = values.array().pow(exponent).matrix();
  return vectors * powered.asDiagonal() * vectors.transpose();
}

int numerical_rank(const VectorD& ascending_values) {
  const auto d = ascending_values.size();
  if (d == 0) return 0;
  const double largest = ascending_values[d - 1];
  if (!(largest > 0)) return 0;
  const double smallest_counted =
      static_cast<double>(d) * std::numeric_limits<double>::epsilon() * largest;
  return static_cast<int>((ascending_values.array() > smallest_counted).count());
}

double condition_number(const MatrixD& t, const std::string& where) {
  const VectorD squared = eigenvalues(t.transpose() * t, where);
  const double smallest = squared[0], largest = squared[squared.size() - 1];
  if (!(smallest > 0)) return std::numeric_limits<double>::infinity();
  return std::sqrt(largest / smallest);
}

}  // namespace oscar
