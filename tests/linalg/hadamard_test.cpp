// Hadamard matrices, the bit-reversal shuffle and the symmetric functions.
#include "oscar/linalg/hadamard.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "oscar/base/error.h"
#include "oscar/linalg/bit_reversal.h"
#include "oscar/linalg/fixed_order.h"
#include "oscar/linalg/symmetric.h"

namespace oscar {
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
}  // namespace oscar
