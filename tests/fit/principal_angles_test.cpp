// Subspaces whose angles are known.
#include "oscar/fit/principal_angles.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "fit/synthetic.h"

namespace oscar {
namespace {

constexpr int kAngleDim = 16;

MatrixD random_basis(std::mt19937_64& generator) {
  const MatrixD m = synthetic::normal_rows(kAngleDim, kAngleDim, generator);
  return eigh(m + m.transpose(), "random").vectors;
}

TEST(PrincipalAngles, AreThoseByWhichPlanesWereTurned) {
  std::mt19937_64 generator(1);
  const MatrixD basis = random_basis(generator);
  const double turns[] = {0.1, 0.7, 1.2};
  MatrixD a = basis.leftCols(3), b(kAngleDim, 3);
  for (int i = 0; i < 3; ++i) {
    b.col(i) = std::cos(turns[i]) * basis.col(i) + std::sin(turns[i]) * basis.col(8 + i);
  }
  // Bases of the same spaces: angles belong to the spaces.
  const MatrixD small = synthetic::normal_rows(3, 3, generator);
  b *= eigh(small + small.transpose(), "turn").vectors;
  const VectorD angles = principal_angles(a, b, "test");
  ASSERT_EQ(angles.size(), 3);
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(angles[i], turns[i], 1e-12);
}

TEST(PrincipalAngles, AreZeroWithinASpaceAndRightBetweenSpacesThatShareNothing) {
  std::mt19937_64 generator(2);
  const MatrixD basis = random_basis(generator);
  const VectorD inside = principal_angles(basis.leftCols(5), basis.middleCols(1, 2), "test");
  ASSERT_EQ(inside.size(), 2);
  EXPECT_LT(inside.maxCoeff(), 1e-7);  // the rounding that the header names
  const VectorD apart = principal_angles(basis.leftCols(4), basis.rightCols(6), "test");
  ASSERT_EQ(apart.size(), 4);
  EXPECT_NEAR(apart.minCoeff(), std::numbers::pi / 2, 1e-7);
}

TEST(LeadingDimensions, AreTheFewestThatHoldTheShare) {
  const VectorD values{{-1e-18, 1.0, 2.0, 3.0, 4.0}};
  EXPECT_EQ(leading_dimensions(values, 0.4), 1);
  EXPECT_EQ(leading_dimensions(values, 0.41), 2);
  EXPECT_EQ(leading_dimensions(values, 0.9), 3);
  EXPECT_EQ(leading_dimensions(values, 1.0), 4);
  EXPECT_EQ(leading_dimensions(VectorD::Zero(3), 0.9), 0);
}

}  // namespace
}  // namespace oscar
