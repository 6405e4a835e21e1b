#include "oscar/fit/linalg.h"

#include <gtest/gtest.h>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "oscar/base/error.h"

namespace oscar {

// The symmetric eigen-solver: reconstruction, order, sign, owner of LAPACK.

namespace {

MatrixD random_matrix(int rows, int cols, unsigned seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<double> normal;
  MatrixD m(rows, cols);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < cols; ++j) m(i, j) = normal(generator);
  return m;
}

MatrixD random_covariance(int d, unsigned seed) {
  const MatrixD x = random_matrix(4 * d, d, seed);
  return x.transpose() * x / (4.0 * d);
}

TEST(Eigh, ReconstructsTheMatrixWithOrthonormalColumnsInAscendingOrder) {
  for (const int d : {1, 2, 7, 64, 128, 256}) {
    const MatrixD c = random_covariance(d, 11);
    const Eigh e = eigh(c, "test");
    const MatrixD identity = e.vectors.transpose() * e.vectors;
    EXPECT_LE((identity - MatrixD::Identity(d, d)).cwiseAbs().maxCoeff(), 1e-12) << d;
    const MatrixD again = e.vectors * e.values.asDiagonal() * e.vectors.transpose();
    EXPECT_LE((again - c).cwiseAbs().maxCoeff(), 1e-12 * c.cwiseAbs().maxCoeff() * d) << d;
    EXPECT_NEAR(e.values.sum(), c.trace(), 1e-11 * c.trace());
    for (int i = 1; i < d; ++i) EXPECT_LE(e.values[i - 1], e.values[i]);
  }
}

TEST(Eigenvalues, AreThoseOfTheWholeDecomposition) {
  for (const int d : {1, 7, 128}) {
    const MatrixD c = random_covariance(d, 13);
    const VectorD values = eigenvalues(c, "test");
    ASSERT_EQ(values.size(), d);
    // Both are backward stable: off by a few roundings of the largest.
    EXPECT_LE((values - eigh(c, "test").values).cwiseAbs().maxCoeff(), 1e-13 * d);
  }
}

TEST(Eigh, UsesTheMeanOfTheMatrixAndItsTranspose) {
  MatrixD a(2, 2);
  a << 2, 4, 0,
      2;  // symmetric part [[2, 2], [2, 2]]: eigenvalues 0 and 4; one triangle gives others
  const Eigh e = eigh(a, "test");
  EXPECT_NEAR(e.values[0], 0.0, 1e-14);
  EXPECT_NEAR(e.values[1], 4.0, 1e-14);
}

TEST(Eigh, EigenvectorsAreColumns) {
  MatrixD a(2, 2);
  a << 5, 2, 2, 2;  // eigenvalue 6 along (2, 1), eigenvalue 1 along (1, -2)
  const Eigh e = eigh(a, "test");
  const double unit = 1 / std::sqrt(5.0);
  EXPECT_NEAR(e.vectors(0, 1), 2 * unit, 1e-14);
  EXPECT_NEAR(e.vectors(1, 1), 1 * unit, 1e-14);
  EXPECT_NEAR(e.vectors(0, 0), -1 * unit, 1e-14);  // its largest entry, the second, is positive
  EXPECT_NEAR(e.vectors(1, 0), 2 * unit, 1e-14);
}

TEST(Eigh, LargestMagnitudeEntryOfEachColumnIsPositive) {
  const Eigh e = eigh(random_covariance(96, 3), "test");
  for (int c = 0; c < 96; ++c) {
    Eigen::Index row = 0;
    e.vectors.col(c).cwiseAbs().maxCoeff(&row);
    EXPECT_GT(e.vectors(row, c), 0) << "column " << c;
  }
}

TEST(Eigh, OfEqualMagnitudesTheLowestRowIsPositive) {
  Eigh e{VectorD(2), MatrixD(2, 2)};
  e.values << 1, 2;
  e.vectors << -0.5, 0.5, 0.5, -0.5;
  canonicalise(e);
  EXPECT_EQ(e.vectors(0, 0), 0.5);
  EXPECT_EQ(e.vectors(1, 0), -0.5);
  EXPECT_EQ(e.vectors(0, 1), 0.5);
  EXPECT_EQ(e.vectors(1, 1), -0.5);
}

TEST(Eigh, ColumnsOfEqualEigenvaluesFollowTheirLargestRow) {
  Eigh e{VectorD(3), MatrixD(3, 3)};
  e.values << 1, 1, 1;
  e.vectors << 0, 0, -1, 1, 0, 0, 0, 1, 0;
  canonicalise(e);
  EXPECT_EQ(e.vectors, MatrixD::Identity(3, 3));
  EXPECT_EQ(eigh(MatrixD::Identity(17, 17), "test").vectors, MatrixD::Identity(17, 17));
}

TEST(Eigh, EqualInputGivesEqualBytes) {
  const MatrixD c = random_covariance(128, 5);
  const Eigh first = eigh(c, "test"), second = eigh(c, "test");
  EXPECT_EQ(first.values, second.values);
  EXPECT_EQ(first.vectors, second.vectors);
}

TEST(Eigh, KeepsTwelveDecadesApart) {
  const int d = 64;
  MatrixD c = MatrixD::Zero(d, d);
  for (int i = 0; i < d; ++i) c(i, i) = std::pow(10.0, -12.0 * i / (d - 1));
  const Eigh e = eigh(c, "test");
  for (int i = 0; i < d; ++i) EXPECT_NEAR(e.values[i], c(d - 1 - i, d - 1 - i), 1e-15);
}

TEST(Eigh, AMatrixThatIsNotFiniteIsAnErrorThatNamesIt) {
  MatrixD c = MatrixD::Identity(4, 4);
  c(2, 1) = std::numeric_limits<double>::quiet_NaN();
  try {
    eigh(c, "layer 3 head 1 q_moment");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.info().where, "layer 3 head 1 q_moment");
  }
}

TEST(Eigh, OpenBlasProvidesDsyevd) {
  EXPECT_NE(lapack_provider().find("openblas"), std::string::npos) << lapack_provider();
}

}  // namespace
}  // namespace oscar

// Inverse and factor in one order: right, and to the bits that any machine must get.

namespace {

using namespace oscar;

// Entries that need no library function: the same on every machine.
MatrixD mixed(int d) {
  MatrixD a(d, d);
  uint64_t state = 1;
  for (double& entry : a.reshaped()) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    entry = static_cast<double>(static_cast<int64_t>(state >> 40) - (int64_t{1} << 23)) / 65536;
  }
  return a;
}

uint64_t bits_of(const MatrixD& matrix) {
  uint64_t all = 0;
  for (const double entry : matrix.reshaped<Eigen::RowMajor>()) {
    all = all * 31 + std::bit_cast<uint64_t>(entry);
  }
  return all;
}

TEST(FixedOrder, TheInverseTimesItsMatrixIsTheIdentity) {
  for (const int d : {1, 2, 7, 64}) {
    const MatrixD a = mixed(d);
    const MatrixD product = fixed_order_inverse(a, "test") * a;
    EXPECT_LE((product - MatrixD::Identity(d, d)).cwiseAbs().maxCoeff(), 1e-10) << d;
  }
}

TEST(FixedOrder, ProductsAndMeansAreSumsFromTheFirstOn) {
  // 1 + 1e16 - 1e16 - 1 from left to right: 1 is lost at once.
  MatrixD a(1, 4), b(4, 1), c = MatrixD::Zero(4, 4);
  a << 1, 1e16, -1e16, -1;
  b << 1, 1, 1, 1;
  c.diagonal() = a.row(0);
  EXPECT_EQ(fixed_order_product(a, b)(0, 0), -1);
  EXPECT_EQ(fixed_order_mean_diagonal(c), -0.25);
  EXPECT_EQ(fixed_order_product(b, a), b * a);
}

TEST(FixedOrder, RowsChangePlacesWhereThePivotIsZero) {
  MatrixD a(3, 3);
  a << 0, 2, 0, 0, 0, 4, 8, 0, 0;
  MatrixD expected(3, 3);
  expected << 0, 0, 0.125, 0.5, 0, 0, 0, 0.25, 0;
  EXPECT_EQ(fixed_order_inverse(a, "test"), expected);
}

TEST(FixedOrder, ASingularMatrixHasNoInverse) {
  MatrixD a(2, 2);
  a << 1, 2, 2, 4;
  EXPECT_THROW(fixed_order_inverse(a, "test"), Error);
  a(1, 1) = NAN;
  EXPECT_THROW(fixed_order_inverse(a, "test"), Error);
}

// Found by the same steps in numpy: files of one machine are read on others.
TEST(FixedOrder, TheBitsAreThoseOfTheSameStepsInNumpy) {
  const MatrixD a = mixed(24);
  EXPECT_EQ(bits_of(fixed_order_inverse(a, "test")), 0x510f5bfa4a7ad538U);
  const MatrixD m = 1024 * MatrixD::Identity(24, 24) + a + a.transpose();
  EXPECT_EQ(bits_of(udu_factor(m, "test")), 0x650f98f5b9695e73U);
}

}  // namespace

namespace oscar {

// Hadamard matrices, the bit-reversal shuffle and the symmetric functions.

namespace {

TEST(Hadamard, OfSizeFourIsSylvestersMatrix) {
  MatrixD expected(4, 4);
  expected << 1, 1, 1, 1, 1, -1, 1, -1, 1, 1, -1, -1, 1, -1, -1, 1;
  EXPECT_EQ(hadamard(4), 0.5 * expected);
}

TEST(Hadamard, IsOrthogonalForEverySize) {
  for (const int d : {1, 2, 8, 12, 64, 80, 96, 112, 128, 192, 256, 7}) {
    const MatrixD h = hadamard(d);
    EXPECT_LE((h.transpose() * h - MatrixD::Identity(d, d)).cwiseAbs().maxCoeff(), 1e-14) << d;
  }
}

TEST(Hadamard, OfSize96DealsRowsToThreeBlocksOf32InTurn) {
  const MatrixD h = hadamard(96);
  EXPECT_EQ(hadamard_block_size(96), 32);
  for (int i = 0; i < 96; ++i) {
    for (int j = 0; j < 96; ++j) {
      const bool inside = j / 32 == i % 3;
      EXPECT_DOUBLE_EQ(std::abs(h(i, j)), inside ? 1 / std::sqrt(32.0) : 0.0);
    }
  }
  EXPECT_LT(h(3 + 1, 32 + 1), 0);  // row 1 of block 1, column 1: the first negative entry
  EXPECT_GT(h(3 + 1, 32 + 2), 0);
}

TEST(BitReversal, PermutationOfEightIsAsPublished) {
  EXPECT_EQ(bit_reversal_permutation(8), (std::vector<int>{7, 3, 5, 1, 6, 2, 4, 0}));
}

TEST(BitReversal, PermutationOf128PutsTheIthLargestAtItsBitReversedPlace) {
  const std::vector<int> perm = bit_reversal_permutation(128);
  EXPECT_EQ(std::vector<int>(perm.begin(), perm.begin() + 8),
            (std::vector<int>{127, 63, 95, 31, 111, 47, 79, 15}));
  EXPECT_EQ(perm[127], 0);
  EXPECT_EQ(perm[64], 126);
  EXPECT_EQ(std::set<int>(perm.begin(), perm.end()).size(), 128u);
  for (int i = 0; i < 128; ++i) {
    int place = 0;  // the seven bits of i read backwards, written out
    for (int bit = 0; bit < 7; ++bit) place += ((i >> bit) & 1) << (6 - bit);
    EXPECT_EQ(perm[place], 127 - i);
  }
}

TEST(BitReversal, PermutationIsTheIdentityWhenTheSizeIsNoPowerOfTwo) {
  EXPECT_EQ(bit_reversal_permutation(6), (std::vector<int>{0, 1, 2, 3, 4, 5}));
}

MatrixD asymmetric_covariance(int d) {
  MatrixD x(3 * d, d);
  for (int i = 0; i < 3 * d; ++i)
    for (int j = 0; j < d; ++j) x(i, j) = std::sin(1.0 + i * 0.7 + j * j * 0.3) * (1 + j);
  return x.transpose() * x + MatrixD::Identity(d, d);
}

TEST(Symmetric, TriangularFactorReconstructsTheMatrix) {
  for (const int d : {1, 2, 5, 64}) {
    const MatrixD m = asymmetric_covariance(d);
    const MatrixD u = udu_factor(m, "test");
    EXPECT_TRUE(u.isUpperTriangular(0));
    for (int i = 0; i < d; ++i) EXPECT_DOUBLE_EQ(u(i, i), 1.0);
    const MatrixD inverse = u.inverse();
    const MatrixD diagonal = inverse * m * inverse.transpose();
    for (int i = 0; i < d; ++i) EXPECT_GT(diagonal(i, i), 0);
    const VectorD on_diagonal = diagonal.diagonal();
    const MatrixD again = u * on_diagonal.asDiagonal() * u.transpose();
    EXPECT_LE((again - m).cwiseAbs().maxCoeff(), 1e-10 * m.cwiseAbs().maxCoeff()) << d;
  }
}

TEST(Symmetric, TriangularFactorOfATwoByTwoMatrixIsAsOnPaper) {
  MatrixD m(2, 2);
  m << 3, 4, 4, 8;  // [[1, 1/2], [0, 1]] diag(1, 8) [[1, 0], [1/2, 1]]
  const MatrixD u = udu_factor(m, "test");
  EXPECT_DOUBLE_EQ(u(0, 1), 0.5);
  EXPECT_EQ(u(1, 0), 0.0);
}

TEST(Symmetric, AnIndefiniteMatrixHasNoTriangularFactor) {
  MatrixD m(2, 2);
  m << 1, 2, 2, 1;
  EXPECT_THROW(udu_factor(m, "test"), Error);
}

TEST(Symmetric, RootTimesInverseRootIsTheIdentity) {
  const Eigh e = eigh(asymmetric_covariance(24), "test");
  const MatrixD product =
      symmetric_power(e.vectors, e.values, 0.5) * symmetric_power(e.vectors, e.values, -0.5);
  EXPECT_LE((product - MatrixD::Identity(24, 24)).cwiseAbs().maxCoeff(), 1e-10);
}

TEST(Symmetric, ConditionNumberIsTheRatioOfSingularValues) {
  const MatrixD diagonal = (VectorD(3) << 0.5, -100, 2).finished().asDiagonal();
  EXPECT_NEAR(condition_number(hadamard(3) * diagonal, "test"), 200, 1e-9);
  EXPECT_TRUE(std::isinf(condition_number(MatrixD::Zero(2, 2), "test")));
}

TEST(Symmetric, NumericalRankCountsWhatRoundingLeavesStanding) {
  EXPECT_EQ(numerical_rank((VectorD(4) << -1e-17, 1e-17, 1e-12, 1).finished()), 2);
  EXPECT_EQ(numerical_rank(VectorD::Zero(4)), 0);
}

TEST(Symmetric, SmallEigenvaluesAreRaisedRelativeToTheLargest) {
  const VectorD raised = raised_eigenvalues((VectorD(3) << -3, 1e-9, 100).finished(), 1e-6);
  EXPECT_EQ(raised, (VectorD(3) << 1e-6 * 100, 1e-6 * 100, 100).finished());
}

}  // namespace

// The mixing that makes every column of a shaped row cost the same.

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
