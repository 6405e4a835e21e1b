// The one exception type of the library: what failed, where, expected against found, and a way out.
#pragma once

#include <stdexcept>
#include <string>

namespace oscar {

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

}  // namespace oscar
