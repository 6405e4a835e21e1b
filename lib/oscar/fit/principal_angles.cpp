// Cosines from the smaller Gram matrix of A^T B.
#include "oscar/fit/principal_angles.h"

#include <algorithm>
#include <cmath>

namespace oscar {

int leading_dimensions(const VectorD& eigenvalues, double share) {
  const VectorD positive = eigenvalues.cwiseMax(0.0);
  const double wanted = share * positive.sum();
  int count = 0;
  for (double held = 0; held < wanted && count < positive.size(); ++count) {
    held += positive[positive.size() - 1 - count];
  }
  return count;
}

VectorD principal_angles(const MatrixD& a, const MatrixD& b, const std::string& where) {
  assert(a.rows() == b.rows());
  const MatrixD product = a.cols() <= b.cols() ? MatrixD(b.transpose() * a)
                                               : MatrixD(a.transpose() * b);  // [more, fewer]
  const VectorD squared = eigh(product.transpose() * product, where + ", principal angles").values;
  VectorD angles(squared.size());
  for (int i = 0; i < angles.size(); ++i) {
    const double cosine = std::sqrt(std::clamp(squared[squared.size() - 1 - i], 0.0, 1.0));
    angles[i] = std::acos(cosine);
  }
  return angles;
}

}  // namespace oscar
