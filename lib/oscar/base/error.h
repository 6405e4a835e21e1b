// Errors of four lines, wrong usage, progress, and what a terminal may be shown of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace oscar {

// What files say, made safe and short enough to print on a terminal.

// Bytes of a quoted text that are shown at most.
inline constexpr size_t kShownBytes = 1000;

// Text of unknown origin as a terminal or a log may have it, in time and memory that do not grow
// with what is left out: control characters, what changes the direction of writing, invisible
// characters and bytes that are no UTF-8 are written as escapes ("\n", "\x1b", "\u202e"), and of
// what is longer than `bytes` the middle is left out, with its length.
std::string printable(std::string_view text, size_t bytes = kShownBytes);

// The same line by line, each of `bytes` at most: line breaks stay as they are.
std::string printable_lines(std::string_view text, size_t bytes = kShownBytes);

// The one exception type of the library: what failed, where, expected against found, and a way out.

// Parts of an error message. Empty parts are left out of the text.
struct ErrorInfo {
  std::string what = {};      // one sentence: what failed
  std::string where = {};     // file, tensor, layer or head it concerns
  std::string expected = {};  // what a correct input would have
  std::string found = {};     // what was there
  std::string hint = {};      // what the reader can do about it
};

// Thrown for bad input, bad files and numerical failures. Programming mistakes are asserts instead.
class Error : public std::runtime_error {
 public:
  explicit Error(ErrorInfo info);
  const ErrorInfo& info() const { return info_; }

 private:
  ErrorInfo info_;
};

// Thrown when the user asked the program to stop (SIGINT or SIGTERM) and work was saved.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The error of a command line: the programs end with another exit code than for bad files.

// Thrown for an option's value that means nothing whatever the files hold, and for options that
// contradict each other, where that shows after the command line was parsed.
class UsageError : public Error {
 public:
  using Error::Error;
};

// How long work reports where it stands. The library never prints: programs pass a sink.

class Progress {
 public:
  virtual ~Progress() = default;
  // A named stage begins; `total` units (0 = unknown) of `unit`, for example "tokens".
  virtual void begin(const std::string& stage, int64_t total, const std::string& unit) = 0;
  virtual void advance(int64_t units) = 0;
  virtual void end() = 0;
  // One remark for the user, for example what was left out of a text.
  virtual void note(const std::string& text) = 0;
  // One on which the worth of the result depends; programs show it with --quiet too.
  virtual void warn(const std::string& text) { note(text); }
};

// Swallows everything; for tests and quiet runs.
class SilentProgress final : public Progress {
 public:
  void begin(const std::string&, int64_t, const std::string&) override {}
  void advance(int64_t) override {}
  void end() override {}
  void note(const std::string&) override {}
};

}  // namespace oscar
