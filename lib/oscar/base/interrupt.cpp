// Signal handlers that set a flag and an alarm.
#include "oscar/base/interrupt.h"

#include <unistd.h>

#include <csignal>
#include <cstring>
#include <string_view>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr int kExitFailed = 1, kExitInterrupted = 130;

volatile std::sig_atomic_t requested = 0;
volatile std::sig_atomic_t noticed = 0;

// Only what a signal handler may call.
[[noreturn]] void leave(std::string_view message, int code) {
  const ssize_t written = ::write(STDERR_FILENO, message.data(), message.size());
  static_cast<void>(written);
  ::_exit(code);
}

void on_stop(int signal, siginfo_t* info, void*) {
  if (signal == SIGINT && info->si_code == SI_TKILL && info->si_pid == ::getpid()) {
    leave(
        "\nthreads cannot be created: not enough memory or processes are allowed\n"
        "  hint:     raise ulimit -v and ulimit -u, or run with OPENBLAS_NUM_THREADS=1\n",
        kExitFailed);
  }
  if (requested != 0) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  requested = 1;
  ::alarm(kStopPatience);
}

void on_alarm(int) {
  if (requested == 0 || noticed != 0) return;
  leave(
      "\nstopped on request, in the middle of work: what was done since the last checkpoint is "
      "lost\n",
      kExitInterrupted);
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
  stop.sa_sigaction = on_stop;
  stop.sa_flags = SA_SIGINFO | SA_RESTART;
  ::sigemptyset(&stop.sa_mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    if (signal == SIGHUP && is_ignored(signal)) continue;
    ::sigaction(signal, &stop, nullptr);
  }
  std::signal(SIGXFSZ, SIG_IGN);
}

bool interrupt_requested() {
  if (requested != 0 && noticed == 0) {
    noticed = 1;
    ::alarm(0);
  }
  return requested != 0;
}

void stop_if_requested(const char* what) {
  if (interrupt_requested()) throw Interrupted(what);
}

}  // namespace oscar
