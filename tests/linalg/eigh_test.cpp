// The symmetric eigen-solver: reconstruction, order, sign, owner of LAPACK.
#include "oscar/linalg/eigh.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "oscar/base/error.h"

namespace oscar {
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
