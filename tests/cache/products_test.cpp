// Sums of products against plain loops.
#include "oscar/cache/products.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace {

template <typename Real>
std::vector<Real> random_values(size_t count, std::mt19937& source) {
  std::normal_distribution<double> normal;
  std::vector<Real> values(count);
  for (Real& value : values) value = static_cast<Real>(normal(source));
  return values;
}

template <typename Real>
void expect_plain_sums(int count, int columns, int stride) {
  std::mt19937 source(static_cast<unsigned>(1000 * count + columns));
  const auto x = random_values<Real>(count, source);
  const auto rows = random_values<Real>(static_cast<size_t>(count) * stride, source);
  auto expected = random_values<Real>(columns + 1, source), sums = expected;
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < columns; ++j) {
      const Real product = x[i] * rows[static_cast<size_t>(i) * stride + j];
      expected[j] += product;
    }
  }
  oscar::add_products(x.data(), count, rows.data(), stride, columns, sums.data());
  EXPECT_EQ(sums, expected) << count << " rows of " << columns << " columns";
}

// The same bits, whatever falls into strips of registers and whatever is left; the number behind
// the last column stays.
TEST(AddProducts, AreThoseOfPlainLoopsToTheBit) {
  for (const int columns : {0, 1, 7, 8, 31, 32, 33, 47, 64, 100, 128}) {
    for (const int count : {0, 1, 2, 16, 65}) {
      expect_plain_sums<float>(count, columns, columns + 3);
      expect_plain_sums<double>(count, columns, columns + 3);
    }
  }
}

}  // namespace
