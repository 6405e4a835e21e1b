// What the process may take of the machine: memory, threads, signals.
#include "oscar/base/process.h"

#include <malloc.h>
#include <poll.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "oscar/base/error.h"

namespace oscar {

// Files of a few numbers.

namespace {

namespace fs = std::filesystem;

struct Names {
  const char *limits[2], *used, *droppable[2];
};
// Above "high" processes are slowed down until next to nothing moves.
constexpr Names kVersion2 = {
    {"memory.max", "memory.high"}, "memory.current", {"inactive_file", "active_file"}};
constexpr Names kVersion1 = {{"memory.limit_in_bytes", "memory.limit_in_bytes"},
                             "memory.usage_in_bytes",
                             {"total_inactive_file", "total_active_file"}};

// kNoMemoryLimit where there is no number: no such file, or "max".
int64_t number_in(const fs::path& file) {
  std::ifstream stream(file);
  int64_t number = 0;
  return stream >> number ? number : kNoMemoryLimit;
}

int64_t left_in(const fs::path& group, const Names& names) {
  const int64_t limit =
      std::min(number_in(group / names.limits[0]), number_in(group / names.limits[1]));
  const int64_t used = number_in(group / names.used);
  if (limit == kNoMemoryLimit || used == kNoMemoryLimit) return kNoMemoryLimit;
  int64_t kept = used;
  std::ifstream statistics(group / "memory.stat");
  int64_t bytes = 0;
  for (std::string name; statistics >> name >> bytes;) {
    if (name == names.droppable[0] || name == names.droppable[1]) kept -= bytes;
  }
  return std::max<int64_t>(0, limit - std::max<int64_t>(0, kept));
}

// Of the group and of those above it. A container sees itself as the mount, whatever its path.
int64_t least_left(const fs::path& mount, const fs::path& path, const Names& names) {
  int64_t left = left_in(mount, names);
  fs::path group = mount;
  for (const fs::path& part : path.relative_path()) {
    group /= part;
    left = std::min(left, left_in(group, names));
  }
  return left;
}

}  // namespace

int64_t control_group_memory(const fs::path& membership, const fs::path& mount) {
  int64_t left = kNoMemoryLimit;
  std::ifstream groups(membership);
  for (std::string line; std::getline(groups, line);) {  // number:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) left = std::min(left, least_left(mount, path, kVersion2));
    if (controllers == "memory") {
      left = std::min(left, least_left(mount / "memory", path, kVersion1));
    }
  }
  return left;
}

// By glibc, which keeps what lies between blocks in use.

namespace {

// Of an evaluation with 252 MiB in use at most: without a bound 326 to 401 MiB and 6.0 s, with 128
// 323 to 354 and 6.5 s, with 112 318 to 340 and 6.5 s, with 96 299 to 346 and 6.9 s. Of one with
// layers twice as wide: 780 MiB and 77 s, with 96 685 to 703 and 79 s.
constexpr size_t kMuchKept = size_t{112} << 20;

}  // namespace

void give_back_freed_memory() { ::malloc_trim(0); }

void give_back_much_freed_memory() {
  if (::mallinfo2().fordblks > kMuchKept) ::malloc_trim(0);
}

// Signal handlers that set a flag and an alarm.

namespace {

constexpr int kExitInterrupted = 130;

// Written by handlers and read by every thread.
std::atomic<bool> requested = false, noticed = false;
std::atomic<int64_t> first_signal = 0;  // when it came; 0: none has
std::atomic<int> taking_time = 0;       // TakesItsTime that live
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free &&
              std::atomic<int64_t>::is_always_lock_free);

// Since the machine's start: above 0.
int64_t milliseconds_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000 + 1;
}

// As the signal does where nothing handles it.
[[noreturn]] void end_by(int signal) {
  std::signal(signal, SIG_DFL);
  sigset_t handled;
  ::sigemptyset(&handled);
  ::sigaddset(&handled, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &handled, nullptr);
  std::raise(signal);
  ::_exit(kExitInterrupted);  // process 1 of a container does not die of a signal of its own
}

void on_stop(int signal) {
  const int64_t now = milliseconds_now();
  int64_t first = 0;
  if (!first_signal.compare_exchange_strong(first, now)) {
    if (now - first >= kOneRequest) end_by(signal);
    return;
  }
  requested = true;
  if (!noticed) ::alarm(kStopPatience);
}

// Not where it would wait for a reader.
void say(std::string_view text) {
  pollfd out{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
  if (::poll(&out, 1, 0) != 1) return;
  const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  static_cast<void>(written);
}

// Calls only what a signal handler may.
void on_alarm(int) {
  if (!requested || noticed) return;
  if (taking_time > 0) {
    say("\nstopping once what is under way has ended; asked again, all ends at once\n");
    return;
  }
  say("\nstopped on request, in the middle of work: what was done since the last checkpoint, if "
      "there is one, is lost\n");
  ::_exit(kExitInterrupted);
}

bool is_ignored(int signal) {
  struct sigaction now {};
  return ::sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

}  // namespace

void install_interrupt_handlers() {
  struct sigaction alarm {};
  alarm.sa_handler = on_alarm;
  alarm.sa_flags = SA_RESTART;
  ::sigemptyset(&alarm.sa_mask);
  ::sigaction(SIGALRM, &alarm, nullptr);
  struct sigaction stop {};
  stop.sa_handler = on_stop;
  stop.sa_flags = SA_RESTART;
  ::sigemptyset(&stop.sa_mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    if (signal == SIGHUP && is_ignored(signal)) continue;
    ::sigaction(signal, &stop, nullptr);
  }
  std::signal(SIGXFSZ, SIG_IGN);
}

bool interrupt_requested() {
  if (!requested) return false;
  if (!noticed.exchange(true)) ::alarm(0);
  return true;
}

bool stop_pending() { return requested; }

TakesItsTime::TakesItsTime() { ++taking_time; }

TakesItsTime::~TakesItsTime() {
  if (--taking_time == 0 && requested && !noticed) ::alarm(kStopPatience);
}

void request_stop() { requested = true; }

void stop_if_requested(const char* what) {
  if (interrupt_requested()) throw Interrupted(what);
}

// Threads that live as long as a call, taken from one count of spare cores.

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
