// Composition of the balanced transform from raised eigenvalues, and its inverse as served.
#include "oscar/fit/balanced_fit.h"

#include <cmath>

#include "oscar/cache/numeric.h"
#include "oscar/linalg/hadamard.h"
#include "oscar/linalg/symmetric.h"

namespace oscar {
namespace {

double nearest_bf16(double value) {
  return bf16_to_float(float_to_bf16(static_cast<float>(value)));
}

}  // namespace

BalancedTransform balanced_transform(const MatrixD& covariance, const MatrixD& weight,
                                     const std::string& where) {
  const int d = static_cast<int>(covariance.rows());
  const Eigh c = eigh(covariance, where + ", covariance");
  const VectorD variances = raised_eigenvalues(c.values, kBalancedFloor);
  const MatrixD root = symmetric_power(c.vectors, variances, 0.5);
  const MatrixD inverse_root = symmetric_power(c.vectors, variances, -0.5);

  const Eigh balanced = eigh(root * weight * root, where + ", balanced product");
  BalancedTransform result;
  result.eigenvalues = raised_eigenvalues(balanced.values, kBalancedFloor);
  const VectorD quarter = result.eigenvalues.array().pow(0.25).matrix();
  const MatrixD h = hadamard(d);
  result.forward = inverse_root * balanced.vectors * quarter.asDiagonal() * h;

  const double mean_square =
      (covariance * result.forward).cwiseProduct(result.forward).sum() / static_cast<double>(d);
  result.forward = (result.forward / std::sqrt(mean_square)).unaryExpr(&nearest_bf16);
  result.inverse = result.forward.inverse();
  result.condition_number = condition_number(result.forward, where + ", transform");
  return result;
}

}  // namespace oscar
