// Standard output, whose failures count, standard error, whose failures never stop a run, and the
// progress of long work.
#include "common/terminal.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <unistd.h>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "oscar/base/error.h"
#include "oscar/base/json.h"
#include "oscar/base/process.h"

namespace oscar::app {

// The C streams, checked by hand: fmt::print throws where a stream fails.

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

// Drawing progress on stderr, so that stdout holds results only.

namespace {

constexpr auto kTerminalInterval = std::chrono::milliseconds(200);
constexpr auto kPlainInterval = std::chrono::seconds(15);
constexpr auto kReplaced = Json::error_handler_t::replace;  // what is not UTF-8

}  // namespace

TerminalProgress::TerminalProgress(bool quiet) : quiet_(quiet) {
  const char* const format = std::getenv("OSCAR_PROGRESS");
  json_ = format != nullptr && std::string_view(format) == "json";
  terminal_ = !json_ && ::isatty(STDERR_FILENO) == 1;
}

void TerminalProgress::begin(const std::string& stage, int64_t total, const std::string& unit) {
  stage_ = stage;
  unit_ = unit;
  total_ = total;
  done_ = 0;
  start_ = last_draw_ = Clock::now();
  if (!quiet_ && (terminal_ || json_)) draw(false);
}

void TerminalProgress::advance(int64_t units) {
  done_ += units;
  if (quiet_) return;
  const auto now = Clock::now();
  const bool often = terminal_ || json_;
  if (now - last_draw_ < (often ? Clock::duration(kTerminalInterval) : kPlainInterval)) return;
  last_draw_ = now;
  draw(false);
}

void TerminalProgress::end() {
  if (!quiet_) draw(true);
}

void TerminalProgress::note(const std::string& text) {
  if (quiet_) return;
  if (json_) return say("{}\n", Json{{"note", text}}.dump(-1, ' ', true, kReplaced));
  say("{}note: {}\n", terminal_ ? "\r\033[K" : "", printable_lines(text));
}

void TerminalProgress::warn(const std::string& text) {
  if (json_) return say("{}\n", Json{{"warning", text}}.dump(-1, ' ', true, kReplaced));
  if (terminal_ && !quiet_) say("\r\033[K");
  app::warn(text);
}

void TerminalProgress::draw(bool final_line) {
  if (json_) {
    const Json told = {{"stage", stage_},
                       {"unit", unit_},
                       {"total", total_},
                       {"done", done_},
                       {"ended", final_line}};
    return say("{}\n", told.dump(-1, ' ', true, kReplaced));
  }
  const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
  const double rate = elapsed > 0 ? static_cast<double>(done_) / elapsed : 0;
  std::string line = fmt::format("{}: ", stage_);
  if (final_line) {
    line += fmt::format("{} {} in {}", format_count(done_), unit_, format_duration(elapsed));
  } else if (total_ > 0) {
    line += fmt::format("{:3d}%", static_cast<int>(100.0 * static_cast<double>(done_) /
                                                   static_cast<double>(total_)));
    if (rate > 0) {
      line += fmt::format("  {} {}/s  {} left", format_count(static_cast<int64_t>(rate)), unit_,
                          format_duration(static_cast<double>(total_ - done_) / rate));
    }
  } else {
    line += fmt::format("{} {}", format_count(done_), unit_);
  }
  if (terminal_) {
    say("\r\033[K{}{}", line.substr(0, 79), final_line ? "\n" : "");
  } else {
    say("{}\n", line);
  }
}

std::string format_count(int64_t value) {
  std::string digits = std::to_string(value);
  for (auto i = static_cast<int64_t>(digits.size()) - 3; i > (value < 0 ? 1 : 0); i -= 3) {
    digits.insert(static_cast<size_t>(i), ",");
  }
  return digits;
}

std::string format_bytes(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= int64_t{1} << 30) return fmt::format("{:.2f} GiB", value / (1 << 30));
  if (bytes >= 1 << 20) return fmt::format("{:.1f} MiB", value / (1 << 20));
  return fmt::format("{:.1f} KiB", value / 1024);
}

std::string format_duration(double seconds) {
  if (seconds < 10) return fmt::format("{:.1f} s", seconds);
  if (seconds < 100) return fmt::format("{:.0f} s", seconds);
  const auto whole = std::llround(seconds);
  if (whole < 6000) return fmt::format("{} min {:02d} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02d} min", whole / 3600, whole / 60 % 60);
}

std::string quoted(const std::string& word) {
  if (word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                             "@%+=:,./_-") == std::string::npos &&
      !word.empty()) {
    return word;
  }
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

void print_next(const std::vector<std::string>& parts) {
  const std::string line = fmt::format("next       {}", fmt::join(parts, " "));
  fmt::print("{}\n",
             line.size() <= 80 ? line : fmt::format("next       {}", fmt::join(parts, " \\\n  ")));
}

}  // namespace oscar::app
