// Standard output, whose failures count, and standard error, whose failures never stop a run.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace oscar::app {

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

}  // namespace oscar::app
