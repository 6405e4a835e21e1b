// The C streams, checked by hand: fmt::print throws where a stream fails.
#include "common/standard_streams.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "oscar/base/interrupt.h"
#include "oscar/base/printable.h"

namespace oscar::app {

void guard_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // The lowest free number is the stream's. Opened for reading, nothing can be written to it.
    if (::fcntl(stream, F_GETFD) < 0 && ::open("/dev/null", O_RDONLY) != stream) return;
  }
  std::signal(SIGPIPE, SIG_IGN);
}

namespace {

// Until standard error takes something. False once a stop was requested and it still does not: a
// message may not keep a run from ending.
bool wait_for_standard_error() {
  constexpr int kWaitMs = 1000;
  pollfd out{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
  for (;;) {
    const int ready = ::poll(&out, 1, kWaitMs);
    if (ready > 0 || (ready < 0 && errno != EINTR)) return true;
    if (ready == 0 && stop_pending()) return false;
  }
}

}  // namespace

void say_text(std::string_view text) {
  if (!wait_for_standard_error()) return;
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
  std::clearerr(stderr);
}

void warn(const std::string& text) { say("warning: {}\n", printable_lines(text)); }

void print_text(std::string_view text) {
  const bool terminal = ::isatty(STDOUT_FILENO) == 1;
  fmt::print("{}", terminal ? printable_lines(text, text.size()) : std::string(text));
}

std::string finish_standard_output() {
  errno = 0;
  const bool failed = std::fflush(stdout) != 0;
  if (!failed && std::ferror(stdout) == 0) return "";
  if (errno == EPIPE) return kReaderLeft;
  return failed && errno != 0 ? std::strerror(errno) : "an earlier write failed";
}

}  // namespace oscar::app
