// The mixing that makes every column of a shaped row cost the same.
#include "oscar/linalg/mixing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "oscar/linalg/fixed_order.h"
#include "oscar/linalg/hadamard.h"

namespace oscar {
namespace {

// Log-normal, from 1/60 to 60 or so, in no order.
VectorD spread_costs(int d, unsigned seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal(0, 1.5);
  VectorD costs(d);
  for (double& cost : costs) cost = std::exp(normal(generator));
  return costs;
}

// D of Q^T diag(costs) Q = U D U^T.
VectorD shaped_costs(const MatrixD& mixing, const VectorD& costs) {
  const MatrixD m = mixing.transpose() * costs.asDiagonal() * mixing;
  const MatrixD inverse = udu_factor(m, "test").inverse();
  return (inverse * m * inverse.transpose()).diagonal().transpose();
}

TEST(EvenCostMixing, IsOrthogonalForEverySize) {
  for (const int d : {1, 2, 6, 7, 12, 64, 96, 128, 256}) {
    const MatrixD q = even_cost_mixing(spread_costs(d, 3));
    EXPECT_LE((q.transpose() * q - MatrixD::Identity(d, d)).cwiseAbs().maxCoeff(), 1e-13) << d;
  }
}

TEST(EvenCostMixing, LeavesEveryColumnTheGeometricMean) {
  for (const int d : {2, 8, 64, 128, 256}) {
    const VectorD costs = spread_costs(d, 5);
    const double mean = std::exp(costs.array().log().mean());
    const VectorD found = shaped_costs(even_cost_mixing(costs), costs);
    // Rounding errors of a factorisation whose condition number is some thousands.
    EXPECT_LE((found.array() / mean - 1).abs().maxCoeff(), 1e-10) << d;
    EXPECT_GT(shaped_costs(hadamard(d), costs).mean(), mean) << d;
  }
}

TEST(EvenCostMixing, OfAnOddFactorStillCostsLessThanHadamard) {
  for (const int d : {12, 96, 80}) {
    const VectorD costs = spread_costs(d, 7);
    EXPECT_LT(shaped_costs(even_cost_mixing(costs), costs).mean(),
              shaped_costs(hadamard(d), costs).mean())
        << d;
  }
}

TEST(EvenCostMixing, OfEqualCostsSpreadsEveryDirectionOverAllColumns) {
  const MatrixD q = even_cost_mixing(VectorD::Constant(64, 3.0));
  EXPECT_LE((q.cwiseAbs().array() - 0.125).abs().maxCoeff(), 1e-14);
}

TEST(EvenCostMixing, TurnsAPairAsWrittenDown) {
  VectorD costs(2);
  costs << 1, 16;  // roots 1 and 4: the larger cost goes to the first column with cos^2 = 4/5
  MatrixD expected(2, 2);
  expected << std::sqrt(0.2), std::sqrt(0.8), std::sqrt(0.8), -std::sqrt(0.2);
  EXPECT_LE((even_cost_mixing(costs) - expected).cwiseAbs().maxCoeff(), 1e-15);
}

}  // namespace
}  // namespace oscar
