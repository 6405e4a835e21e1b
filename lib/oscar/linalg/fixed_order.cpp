// Elimination in plain loops over rows, which are contiguous.
#include "oscar/linalg/fixed_order.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "oscar/base/error.h"

namespace oscar {

MatrixD fixed_order_product(const MatrixD& a, const MatrixD& b) {
  assert(a.cols() == b.rows());
  MatrixD c = MatrixD::Zero(a.rows(), b.cols());
  for (Eigen::Index i = 0; i < a.rows(); ++i) {
    double* const row = c.data() + i * b.cols();
    for (Eigen::Index k = 0; k < a.cols(); ++k) {
      const double factor = a(i, k);
      const double* const other = b.data() + k * b.cols();
      for (Eigen::Index j = 0; j < b.cols(); ++j) row[j] += factor * other[j];
    }
  }
  return c;
}

double fixed_order_mean_diagonal(const MatrixD& a) {
  double sum = 0;
  for (Eigen::Index i = 0; i < a.rows(); ++i) sum += a(i, i);
  return sum / static_cast<double>(a.rows());
}

MatrixD fixed_order_inverse(MatrixD a, const std::string& where) {
  assert(a.rows() == a.cols());
  const auto d = a.rows();
  std::vector<Eigen::Index> taken(static_cast<size_t>(d));
  for (Eigen::Index k = 0; k < d; ++k) {
    Eigen::Index best = k;
    for (Eigen::Index i = k + 1; i < d; ++i) {
      if (std::abs(a(i, k)) > std::abs(a(best, k))) best = i;
    }
    taken[static_cast<size_t>(k)] = best;
    double* const pivot_row = a.data() + k * d;
    if (best != k) std::swap_ranges(pivot_row, pivot_row + d, a.data() + best * d);
    const double pivot = pivot_row[k];
    if (pivot == 0 || !std::isfinite(pivot)) {
      throw Error(
          {.what = "a matrix has no inverse",
           .where = where,
           .found = "a pivot of " + std::to_string(pivot) + " in column " + std::to_string(k)});
    }
    pivot_row[k] = 1;
    for (Eigen::Index c = 0; c < d; ++c) pivot_row[c] /= pivot;
    for (Eigen::Index i = 0; i < d; ++i) {
      if (i == k) continue;
      double* const row = a.data() + i * d;
      const double factor = row[k];
      row[k] = 0;
      for (Eigen::Index c = 0; c < d; ++c) row[c] -= factor * pivot_row[c];
    }
  }
  for (Eigen::Index k = d; k-- > 0;) {
    const Eigen::Index other = taken[static_cast<size_t>(k)];
    if (other == k) continue;
    for (Eigen::Index i = 0; i < d; ++i) std::swap(a(i, k), a(i, other));
  }
  return a;
}

MatrixD udu_factor(MatrixD m, const std::string& where) {
  assert(m.rows() == m.cols());
  const auto d = m.rows();
  MatrixD u = MatrixD::Identity(d, d);
  std::vector<double> column(static_cast<size_t>(d));
  for (Eigen::Index j = d; j-- > 0;) {
    const double pivot = m(j, j);
    if (!(pivot > 0) || !std::isfinite(pivot)) {
      throw Error(
          {.what = "a metric has no triangular factor",
           .where = where,
           .expected = "a positive definite matrix",
           .found = "a pivot of " + std::to_string(pivot) + " in column " + std::to_string(j)});
    }
    for (Eigen::Index i = 0; i < j; ++i) {
      column[static_cast<size_t>(i)] = m(i, j);
      u(i, j) = m(i, j) / pivot;
    }
    for (Eigen::Index i = 0; i < j; ++i) {
      const double factor = u(i, j);
      double* const row = m.data() + i * d;
      for (Eigen::Index k = i; k < j; ++k) row[k] -= factor * column[static_cast<size_t>(k)];
    }
  }
  return u;
}

}  // namespace oscar
