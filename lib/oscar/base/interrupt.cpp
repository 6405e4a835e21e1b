// Signal handlers that set a flag and an alarm.
#include "oscar/base/interrupt.h"

#include <unistd.h>

#include <csignal>
#include <cstring>
#include <string_view>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr int kExitInterrupted = 130;

volatile std::sig_atomic_t requested = 0;
volatile std::sig_atomic_t noticed = 0;

void on_stop(int signal) {
  if (requested != 0) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
    return;
  }
  requested = 1;
  ::alarm(kStopPatience);
}

// Calls only what a signal handler may.
void on_alarm(int) {
  if (requested == 0 || noticed != 0) return;
  constexpr std::string_view kMessage =
      "\nstopped on request, in the middle of work: what was done since the last checkpoint is "
      "lost\n";
  const ssize_t written = ::write(STDERR_FILENO, kMessage.data(), kMessage.size());
  static_cast<void>(written);
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
  if (requested != 0 && noticed == 0) {
    noticed = 1;
    ::alarm(0);
  }
  return requested != 0;
}

void request_stop() { requested = 1; }

void stop_if_requested(const char* what) {
  if (interrupt_requested()) throw Interrupted(what);
}

}  // namespace oscar
