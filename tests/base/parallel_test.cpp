// Loops whose steps run side by side.
#include "oscar/base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace oscar {
namespace {

TEST(ParallelFor, EveryStepRunsOnce) {
  for (const int64_t count : {0, 1, 2, 1000}) {
    std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
    parallel_for(count, [&](int64_t i) { ++seen[static_cast<size_t>(i)]; });
    for (const auto& times : seen) EXPECT_EQ(times, 1);
  }
}

TEST(ParallelFor, LoopsWithinLoopsEndAndUseNoMoreThreadsThanCores) {
  std::mutex mutex;
  std::set<std::thread::id> inside;
  size_t most = 0;
  std::atomic<int> steps{0};
  parallel_for(8, [&](int64_t) {
    parallel_for(8, [&](int64_t) {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        inside.insert(std::this_thread::get_id());
        most = std::max(most, inside.size());
      }
      std::this_thread::yield();
      ++steps;
      const std::lock_guard<std::mutex> lock(mutex);
      inside.erase(std::this_thread::get_id());
    });
  });
  EXPECT_EQ(steps, 64);
  EXPECT_LE(most, std::max(1U, std::thread::hardware_concurrency()));
}

TEST(ParallelFor, UsesNoMoreThreadsThanItIsGiven) {
  std::atomic<int64_t> inside{0}, most{0};
  for (const int64_t threads : {1, 2}) {
    most = 0;
    parallel_for(
        200,
        [&](int64_t) {
          most = std::max<int64_t>(most, ++inside);
          std::this_thread::yield();
          --inside;
        },
        threads);
    EXPECT_LE(most, threads);
  }
}

TEST(ParallelFor, TheFirstFailureInOrderIsTheOneThatIsThrown) {
  for (int round = 0; round < 100; ++round) {
    std::atomic<int64_t> last{0};
    try {
      parallel_for(1000, [&](int64_t i) {
        last = std::max<int64_t>(last, i);
        if (i >= 3) throw std::runtime_error(std::to_string(i));
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "3");
    }
    EXPECT_LT(last, 999) << "steps behind a failure are begun";
  }
}

TEST(ParallelFor, CoresAreGivenBackBehindAFailure) {
  for (int round = 0; round < 200; ++round) {
    EXPECT_THROW(parallel_for(4, [](int64_t) { throw std::runtime_error("no"); }),
                 std::runtime_error);
  }
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "one core";
  // Two steps that wait for each other end only when two threads run them.
  std::atomic<int> here{0};
  parallel_for(2, [&](int64_t) {
    ++here;
    while (here < 2) std::this_thread::yield();
  });
}

}  // namespace
}  // namespace oscar
