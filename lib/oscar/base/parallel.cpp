// Threads that live as long as a call, taken from one count of spare cores.
#include "oscar/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace oscar {
namespace {

// Cores beside that of the caller that no call uses now.
std::atomic<int64_t>& spare_cores() {
  static std::atomic<int64_t> spare{parallel_cores() - 1};
  return spare;
}

bool take_core() {
  int64_t spare = spare_cores().load();
  while (spare > 0 && !spare_cores().compare_exchange_weak(spare, spare - 1)) {
  }
  return spare > 0;
}

// What the threads of one call share.
struct Loop {
  Loop(int64_t steps, const std::function<void(int64_t)>& step) : count(steps), work(step) {}

  const int64_t count;
  const std::function<void(int64_t)>& work;
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  int64_t failed = count;    // the first step that threw
  std::exception_ptr error;  // of that step

  void run() {
    for (;;) {
      const int64_t step = next.fetch_add(1);
      if (step >= count) return;
      try {
        work(step);
      } catch (...) {
        next = count;
        const std::lock_guard<std::mutex> lock(mutex);
        if (step < failed) {
          failed = step;
          error = std::current_exception();
        }
      }
    }
  }
};

}  // namespace

int64_t parallel_cores() {
  return std::max<int64_t>(1, int64_t{std::thread::hardware_concurrency()});
}

void parallel_for(int64_t count, const std::function<void(int64_t)>& work, int64_t most_threads) {
  Loop loop(count, work);
  std::vector<std::thread> others;
  const int64_t most_others = std::max<int64_t>(0, std::min(count, most_threads) - 1);
  others.reserve(static_cast<size_t>(most_others));
  while (static_cast<int64_t>(others.size()) < most_others && take_core()) {
    try {
      others.emplace_back([&loop] {
        loop.run();
        ++spare_cores();
      });
    } catch (const std::exception&) {  // no more threads or memory to be had: fewer do
      ++spare_cores();
      break;
    }
  }
  loop.run();
  for (std::thread& other : others) other.join();
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace oscar
