// A request to stop always ends a process soon, and says why it ended.
#include "oscar/base/interrupt.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <functional>
#include <string>
#include <thread>

#include "checkpoint/model_folder.h"
#include "oscar/base/atomic_file.h"
#include "oscar/base/error.h"
#include "support/slowed.h"

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
