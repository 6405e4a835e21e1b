#include "oscar/base/process.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "model/checkpoint/model_folder.h"
#include "oscar/base/error.h"
#include "oscar/base/files.h"
#include "support/slowed.h"

// A container's memory limit counts where there is one.

namespace {

using namespace oscar;
using namespace oscar_test;
namespace fs = std::filesystem;

struct ControlGroups : testing::Test {
  void write(const fs::path& name, const std::string& text) const {
    fs::create_directories((folder.path() / name).parent_path());
    write_file(folder.path() / name, text);
  }
  int64_t left() const { return control_group_memory(folder.path() / "membership", folder.path()); }
  TemporaryFolder folder;
};

TEST_F(ControlGroups, HaveNoLimitWhereNoneIsWritten) {
  EXPECT_EQ(left(), kNoMemoryLimit);
  write("membership", "0::/a\n");
  EXPECT_EQ(left(), kNoMemoryLimit);
  write("a/memory.max", "max\n");
  write("a/memory.current", "5\n");
  EXPECT_EQ(left(), kNoMemoryLimit);
}

TEST_F(ControlGroups, LeaveTheirLimitLessWhatIsUsedAndCannotBeDropped) {
  write("membership", "0::/a/b\n");
  write("a/b/memory.max", "1000\n");
  write("a/b/memory.current", "400\n");
  write("a/b/memory.stat", "anon 100\ninactive_file 120\nactive_file 80\nslab 1\n");
  EXPECT_EQ(left(), 800);
  write("a/memory.max", "700\n");  // of all groups in it
  write("a/memory.current", "600\n");
  EXPECT_EQ(left(), 100);
  write("a/memory.current", "900\n");
  EXPECT_EQ(left(), 0);
}

TEST_F(ControlGroups, AreSlowAboveTheirHighMark) {
  write("membership", "0::/a\n");
  write("a/memory.max", "max\n");
  write("a/memory.high", "600\n");
  write("a/memory.current", "100\n");
  EXPECT_EQ(left(), 500);
}

TEST_F(ControlGroups, ThatCanDropMoreThanTheyUseLeaveTheirLimit) {
  write("membership", "0::/\n");
  write("memory.max", "1000\n");
  write("memory.current", "100\n");
  write("memory.stat", "inactive_file 300\n");
  EXPECT_EQ(left(), 1000);
}

TEST_F(ControlGroups, OfAContainerAreTheMountItself) {
  write("membership", "0::/../outside\n");
  write("memory.max", "1000\n");
  write("memory.current", "250\n");
  EXPECT_EQ(left(), 750);
}

TEST_F(ControlGroups, OfTheFirstVersionCountToo) {
  write("membership", "5:cpu:/x\n4:memory:/a\n");
  write("memory/a/memory.limit_in_bytes", "1000\n");
  write("memory/a/memory.usage_in_bytes", "500\n");
  write("memory/a/memory.stat", "cache 300\ntotal_inactive_file 300\n");
  EXPECT_EQ(left(), 800);
  write("membership", "4:memory:/a\n0::/b\n");  // beside the second one
  EXPECT_EQ(left(), 800);
  write("memory/a/memory.limit_in_bytes", "9223372036854771712\n");  // none
  EXPECT_GT(left(), int64_t{1} << 60);
}

}  // namespace

// A request to stop always ends a process soon, and says why it ended.

namespace {

using namespace oscar;

struct Ended {
  int status = 0;
  double seconds = 0;
  std::string said;  // on stderr
};

constexpr int kNoNamespaces = 77;

// Goes on as process 1 of a PID namespace; the process that was ends with its exit code.
void become_process_one() {
  if (::unshare(CLONE_NEWPID) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) {
    ::_exit(kNoNamespaces);
  }
  const pid_t first = ::fork();
  if (first == 0) return;
  ::close(STDERR_FILENO);
  int status = 0;
  ::waitpid(first, &status, 0);
  ::_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
}

// `body` in a child with handlers; once it has written "ready" to its stderr, it gets `signals`,
// with `pause` after each.
Ended run(const std::function<void()>& body, std::initializer_list<int> signals,
          std::chrono::milliseconds pause = {}) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) return {};
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[0]);
    install_interrupt_handlers();
    static_cast<void>(!::write(STDERR_FILENO, "ready", 5));
    body();
    ::_exit(0);
  }
  ::close(ends[1]);
  Ended ended;
  const auto start = std::chrono::steady_clock::now();
  std::array<char, 256> buffer{};
  bool sent = false;
  for (ssize_t count = 0; (count = ::read(ends[0], buffer.data(), buffer.size())) > 0;) {
    ended.said.append(buffer.data(), static_cast<size_t>(count));
    if (sent || !ended.said.starts_with("ready")) continue;
    sent = true;
    for (const int signal : signals) {
      ::kill(child, signal);
      std::this_thread::sleep_for(pause);
    }
  }
  ::close(ends[0]);
  ::waitpid(child, &ended.status, 0);
  ended.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return ended;
}

// As a read of a FIFO that nobody writes to: the signal does not end it. ThreadSanitizer, which
// puts handlers off to the next call that it knows, would never come to one.
void wait_for_ever() {
  while (oscar_test::kThreadSanitizer) ::usleep(1000);
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) ::_exit(9);
  char byte = 0;
  while (::read(ends[0], &byte, 1) != 0) {
  }
}

TEST(Interrupt, OneRequestThatNobodyNoticesEndsTheProcessWithinFiveSeconds) {
  const Ended ended = run(wait_for_ever, {SIGTERM});
  ASSERT_TRUE(WIFEXITED(ended.status)) << ended.status;
  EXPECT_EQ(WEXITSTATUS(ended.status), 130);
  static_assert(kStopPatience < 5);
  EXPECT_LT(ended.seconds, kStopPatience + 4.0);  // a busy machine delivers late
  EXPECT_NE(ended.said.find("stopped on request, in the middle of work"), std::string::npos);
}

TEST(Interrupt, OneThatIsNoticedLeavesTheTimeThatItTakes) {
  const auto before = std::signal(SIGHUP, SIG_DFL);  // nohup has it ignored
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const Ended ended = run(
        [] {
          while (!interrupt_requested()) ::usleep(1000);
          try {
            stop_if_requested();
          } catch (const Interrupted&) {
            ::_exit(::alarm(0) == 0 ? 7 : 8);  // no alarm is set any more
          }
        },
        {signal});
    ASSERT_TRUE(WIFEXITED(ended.status)) << signal;
    EXPECT_EQ(WEXITSTATUS(ended.status), 7) << signal;
  }
  std::signal(SIGHUP, before);
}

constexpr std::chrono::milliseconds kLater{kOneRequest + 100};

TEST(Interrupt, ASecondRequestEndsTheProcessAtOnce) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const Ended ended = run(wait_for_ever, {signal, signal}, kLater);
    ASSERT_TRUE(WIFSIGNALED(ended.status)) << ended.status;
    EXPECT_EQ(WTERMSIG(ended.status), signal);
    EXPECT_LT(ended.seconds, 4.0);
  }
}

TEST(Interrupt, ASecondRequestEndsProcessOneOfAContainerToo) {
  const Ended ended = run(
      [] {
        become_process_one();
        ::kill(::getpid(), SIGINT);
        std::this_thread::sleep_for(kLater);
        ::kill(::getpid(), SIGINT);
        ::_exit(::getpid() == 1 ? 8 : 9);
      },
      {});
  ASSERT_TRUE(WIFEXITED(ended.status)) << ended.status;
  if (WEXITSTATUS(ended.status) == kNoNamespaces) GTEST_SKIP() << "no PID namespace can be made";
  EXPECT_EQ(WEXITSTATUS(ended.status), 130);
}

void work_for(std::chrono::seconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) ::usleep(1000);
}

TEST(Interrupt, WorkThatTakesItsTimeComesToItsEnd) {
  const Ended ended = run(
      [] {
        {
          const TakesItsTime patience;
          work_for(std::chrono::seconds(kStopPatience + 1));
        }
        ::_exit(interrupt_requested() && ::alarm(0) == 0 ? 7 : 8);
      },
      {SIGTERM});
  ASSERT_TRUE(WIFEXITED(ended.status)) << ended.status;
  EXPECT_EQ(WEXITSTATUS(ended.status), 7);
  EXPECT_NE(ended.said.find("once what is under way has ended"), std::string::npos) << ended.said;
}

TEST(Interrupt, WhatFollowsWorkThatTakesItsTimeHasToNoticeSoon) {
  const Ended ended = run(
      [] {
        {
          const TakesItsTime patience;
          ::raise(SIGTERM);
        }
        ::alarm(0);
        { const TakesItsTime patience; }
        wait_for_ever();
      },
      {});
  ASSERT_TRUE(WIFEXITED(ended.status)) << ended.status;
  EXPECT_EQ(WEXITSTATUS(ended.status), 130);
}

// As torchrun, timeout and a service manager send it.
TEST(Interrupt, SignalsThatComeTogetherAreOneRequest) {
  const Ended ended = run(
      [] {
        while (!interrupt_requested()) ::usleep(1000);
        ::usleep(300'000);
        ::_exit(7);
      },
      {SIGINT, SIGTERM, SIGTERM}, std::chrono::milliseconds(50));
  ASSERT_TRUE(WIFEXITED(ended.status)) << ended.status;
  EXPECT_EQ(WEXITSTATUS(ended.status), 7);
}

TEST(Interrupt, ASignalAfterAStopForTheProgramsOwnReasonsIsTheFirst) {
  const Ended ended = run(
      [] {
        request_stop();
        std::raise(SIGTERM);
        ::_exit(interrupt_requested() ? 7 : 8);
      },
      {});
  ASSERT_TRUE(WIFEXITED(ended.status)) << ended.status;
  EXPECT_EQ(WEXITSTATUS(ended.status), 7);
}

// ThreadSanitizer would say so on stderr.
TEST(Interrupt, ARequestIsSeenByEveryThreadWithoutARace) {
  const Ended ended = run(
      [] {
        const auto wait = [] {
          while (!interrupt_requested()) std::this_thread::yield();
        };
        std::thread one(wait), other(wait);
        request_stop();
        one.join();
        other.join();
        ::_exit(7);
      },
      {});
  EXPECT_EQ(WEXITSTATUS(ended.status), 7);
  EXPECT_EQ(ended.said, "ready");
}

TEST(Interrupt, AnIgnoredHangUpStaysIgnored) {
  const auto before = std::signal(SIGHUP, SIG_IGN);
  const Ended ended = run(
      [] {
        std::raise(SIGHUP);
        ::_exit(interrupt_requested() ? 8 : 7);
      },
      {});
  std::signal(SIGHUP, before);
  EXPECT_EQ(WEXITSTATUS(ended.status), 7);
}

TEST(Interrupt, AFileThatGrowsOverTheLimitIsAnErrorThatLeavesNothing) {
  const oscar_test::TemporaryFolder folder;
  const Ended ended = run(
      [&] {
        const rlimit limit{.rlim_cur = 1000, .rlim_max = 1000};
        ::setrlimit(RLIMIT_FSIZE, &limit);
        try {
          write_file_atomically(folder.path() / "out", std::string(5000, 'x'));
        } catch (const Error& error) {
          const bool said = std::string(error.what()).find("File too large") != std::string::npos;
          ::_exit(said ? 7 : 8);
        }
      },
      {});
  ASSERT_TRUE(WIFEXITED(ended.status)) << ended.status;
  EXPECT_EQ(WEXITSTATUS(ended.status), 7);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace

namespace oscar {

// Loops whose steps run side by side.

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
