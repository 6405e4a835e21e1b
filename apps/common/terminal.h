// Standard output, whose failures count, standard error, whose failures never stop a run, and the
// progress of long work.
#pragma once

#include <fmt/format.h>
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/base/error.h"

namespace oscar::app {

// Standard output, whose failures count, and standard error, whose failures never stop a run.

// Before anything is opened: streams that came closed are opened such that writing to them fails,
// so that no file takes their place, and a reader that goes away is an error and no signal.
void guard_standard_streams();

// To standard error; nobody hears of a failure.
void say_text(std::string_view text);
template <typename... T>
void say(fmt::format_string<T...> format, T&&... arguments) {
  say_text(fmt::format(format, std::forward<T>(arguments)...));
}
// A line on standard error; what a terminal must not obey in `text` is escaped.
void warn(const std::string& text);

// To standard output: data as they are to files and programs, and with what a terminal must not
// obey escaped to a terminal.
void print_text(std::string_view text);

// Writes out what is buffered. Why that or an earlier write to standard output failed; "" when none
// did, kReaderLeft when the other end of a pipe was closed.
inline constexpr const char* kReaderLeft = "reader left";
std::string finish_standard_output();

// Where a text is written: "-" is standard output.
inline constexpr const char* kStandardOutput = "-";

// Progress of long work: one line with rate and time left on a terminal, plain lines otherwise.
// Where it is quiet, warnings alone.
// With OSCAR_PROGRESS=json in the environment, for programs that show it themselves, lines of JSON:
// {"stage", "unit", "total" (0: unknown), "done", "ended"}, {"note"} and {"warning"}.

class TerminalProgress final : public Progress {
 public:
  explicit TerminalProgress(bool quiet);

  void begin(const std::string& stage, int64_t total, const std::string& unit) override;
  void advance(int64_t units) override;
  void end() override;
  void note(const std::string& text) override;
  void warn(const std::string& text) override;

 private:
  using Clock = std::chrono::steady_clock;
  void draw(bool final_line);

  bool quiet_, terminal_, json_;
  std::string stage_, unit_;
  int64_t total_ = 0, done_ = 0;
  Clock::time_point start_{}, last_draw_{};
};

// "1,234,567"; "12.3 MiB"; "1 min 05 s".
std::string format_count(int64_t value);
std::string format_bytes(int64_t bytes);
std::string format_duration(double seconds);

// A word as a shell reads it.
std::string quoted(const std::string& word);

// What to type next, as the last line of a run; over several lines where it is long.
void print_next(const std::vector<std::string>& parts);

}  // namespace oscar::app
