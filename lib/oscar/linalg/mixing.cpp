// Pairs of directions turned level by level.
#include "oscar/linalg/mixing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace oscar {

MatrixD even_cost_mixing(const VectorD& costs) {
  const auto d = costs.size();
  if (d % 2 != 0) return MatrixD::Identity(d, d);
  assert(costs.minCoeff() > 0);
  std::vector<Eigen::Index> order(static_cast<size_t>(d));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](Eigen::Index i, Eigen::Index j) { return costs[i] > costs[j]; });
  // Pair i: its larger cost, its smaller one.
  const auto half = d / 2;
  const auto larger = [&](Eigen::Index i) { return order[static_cast<size_t>(i)]; };
  const auto smaller = [&](Eigen::Index i) { return order[static_cast<size_t>(d - 1 - i)]; };
  VectorD even(half);
  for (Eigen::Index i = 0; i < half; ++i) even[i] = std::sqrt(costs[larger(i)] * costs[smaller(i)]);
  const MatrixD inner = even_cost_mixing(even);
  MatrixD mixed(d, d);
  for (Eigen::Index i = 0; i < half; ++i) {
    const Eigen::Index a = larger(i), b = smaller(i);
    const double root_a = std::sqrt(costs[a]), root_b = std::sqrt(costs[b]);
    const double sine = std::sqrt(root_b / (root_a + root_b));
    const double cosine = std::sqrt(root_a / (root_a + root_b));
    // The later column costs a sine^2 + b cosine^2; of the earlier one a b over that is left.
    mixed.row(a).head(half) = cosine * inner.row(i);
    mixed.row(b).head(half) = sine * inner.row(i);
    mixed.row(a).tail(half) = -sine * inner.row(i);
    mixed.row(b).tail(half) = cosine * inner.row(i);
  }
  return mixed;
}

}  // namespace oscar
