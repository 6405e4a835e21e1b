// Inverse and factor in one order: right, and to the bits that any machine must get.
#include "oscar/linalg/fixed_order.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "oscar/base/error.h"

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

// Found by numpy through python/oscar_int2/derived.py: files of one machine are read on others.
TEST(FixedOrder, TheBitsAreThoseOfTheSameStepsInNumpy) {
  const MatrixD a = mixed(24);
  EXPECT_EQ(bits_of(fixed_order_inverse(a, "test")), 0x510f5bfa4a7ad538U);
  const MatrixD m = 1024 * MatrixD::Identity(24, 24) + a + a.transpose();
  EXPECT_EQ(bits_of(udu_factor(m, "test")), 0x650f98f5b9695e73U);
}

}  // namespace
