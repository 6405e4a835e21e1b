// A request to stop always ends a process soon, and says why it ended.
#include "oscar/base/interrupt.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <functional>
#include <string>

#include "checkpoint/model_folder.h"
#include "oscar/base/atomic_file.h"
#include "oscar/base/error.h"

namespace {

using namespace oscar;

struct Ended {
  int status = 0;
  double seconds = 0;
  std::string said;  // on stderr
};

// `body` in a child with handlers; once it has written "ready" to its stderr, it gets `signals`.
Ended run(const std::function<void()>& body, std::initializer_list<int> signals) {
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
    for (const int signal : signals) ::kill(child, signal);
  }
  ::close(ends[0]);
  ::waitpid(child, &ended.status, 0);
  ended.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return ended;
}

// As a read of a FIFO that nobody writes to: the signal does not end it.
void wait_for_ever() {
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
}

TEST(Interrupt, ASecondRequestEndsTheProcessAtOnce) {
  // Two of one kind may be taken for one while the first is delivered.
  const Ended ended = run(wait_for_ever, {SIGINT, SIGTERM});
  ASSERT_TRUE(WIFSIGNALED(ended.status)) << ended.status;
  EXPECT_LT(ended.seconds, 3.0);
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
