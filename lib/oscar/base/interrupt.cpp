// Signal handlers that set a flag and an alarm.
#include "oscar/base/interrupt.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <string_view>

#include "oscar/base/error.h"

namespace oscar {
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

}  // namespace oscar
