// Composition of the balanced transforms from raised eigenvalues, and the inverse as served.
#include "oscar/fit/balanced_fit.h"

#include <cmath>

#include "oscar/cache/numeric.h"
#include "oscar/linalg/fixed_order.h"
#include "oscar/linalg/hadamard.h"
#include "oscar/linalg/mixing.h"
#include "oscar/linalg/symmetric.h"

namespace oscar {
namespace {

double nearest_bf16(double value) {
  return bf16_to_float(float_to_bf16(static_cast<float>(value)));
}

BalancedTransform compose(const BalancedBasis& basis, double exponent, const MatrixD& mixing,
                          const std::string& where) {
  const VectorD scales = basis.product.values.array().pow(exponent).matrix();
  BalancedTransform result;
  result.eigenvalues = basis.product.values;
  result.forward = basis.inverse_root * basis.product.vectors * scales.asDiagonal() * mixing;
  const double mean_square =
      (basis.covariance * result.forward).cwiseProduct(result.forward).sum() /
      static_cast<double>(basis.covariance.rows());
  result.forward = (result.forward / std::sqrt(mean_square)).unaryExpr(&nearest_bf16);
  result.condition_number = condition_number(result.forward, where + ", transform");
  if (result.condition_number <= kLargestCondition) {
    result.inverse = fixed_order_inverse(result.forward, where + ", transform");
  }
  return result;
}

}  // namespace

BalancedBasis balanced_basis(const MatrixD& covariance, const Eigh& decomposed,
                             const MatrixD& weight, const std::string& where) {
  const VectorD variances = raised_eigenvalues(decomposed.values, kBalancedFloor);
  const MatrixD root = symmetric_power(decomposed.vectors, variances, 0.5);
  BalancedBasis basis{.covariance = covariance,
                      .inverse_root = symmetric_power(decomposed.vectors, variances, -0.5),
                      .product = eigh(root * weight * root, where + ", balanced product")};
  basis.product.values = raised_eigenvalues(basis.product.values, kBalancedFloor);
  return basis;
}

BalancedTransform plain_balanced_transform(const BalancedBasis& basis, const std::string& where) {
  const int d = static_cast<int>(basis.covariance.rows());
  return compose(basis, kPlainExponent, hadamard(d), where);
}

BalancedTransform shaped_balanced_transform(const BalancedBasis& basis, double exponent,
                                            const std::string& where) {
  const VectorD costs = basis.product.values.array().pow(1 - 2 * exponent).matrix();
  return compose(basis, exponent, even_cost_mixing(costs), where);
}

}  // namespace oscar
