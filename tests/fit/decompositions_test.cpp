// Decompositions are shared between fits and threads.
#include "oscar/fit/decompositions.h"

#include <gtest/gtest.h>

#include <future>
#include <limits>
#include <random>
#include <vector>

#include "fit/synthetic.h"
#include "oscar/base/error.h"

namespace oscar {
namespace {

TEST(Decompositions, OfEqualMatricesAreOneFromAnyThread) {
  std::mt19937_64 generator(3);
  const MatrixD rows = synthetic::normal_rows(200, 64, generator);
  const MatrixD moment = rows.transpose() * rows;
  Decompositions decompositions;
  std::vector<std::future<const Eigh*>> found;
  for (int i = 0; i < 8; ++i) {
    found.push_back(std::async(std::launch::async, [&, i] {
      const MatrixD own = i % 2 ? MatrixD(moment) : MatrixD(2 * moment);
      return &decompositions.of(own, "test");
    }));
  }
  std::vector<const Eigh*> all;
  for (auto& one : found) all.push_back(one.get());
  for (size_t i = 2; i < all.size(); ++i) EXPECT_EQ(all[i], all[i - 2]);
  EXPECT_NE(all[0], all[1]);
  const Eigh alone = eigh(moment, "test");
  EXPECT_EQ(all[1]->vectors, alone.vectors) << "side by side, the same bits";
  EXPECT_EQ(all[1]->values, alone.values);
}

TEST(Decompositions, FailForEveryoneWhoAsks) {
  Decompositions decompositions;
  MatrixD broken = MatrixD::Identity(4, 4);
  broken(1, 2) = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 2; ++i) EXPECT_THROW(decompositions.of(broken, "test"), Error);
}

}  // namespace
}  // namespace oscar
