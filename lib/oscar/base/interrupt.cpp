// Signal handlers that only set a flag.
#include "oscar/base/interrupt.h"

#include <csignal>

#include "oscar/base/error.h"

namespace oscar {
namespace {

volatile std::sig_atomic_t requested = 0;

void on_signal(int signal) {
  if (requested != 0) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  requested = 1;
}

}  // namespace

void install_interrupt_handlers() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}

bool interrupt_requested() { return requested != 0; }

void stop_if_requested(const char* what) {
  if (interrupt_requested()) throw Interrupted(what);
}

}  // namespace oscar
