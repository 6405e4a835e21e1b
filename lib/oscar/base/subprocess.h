// Running another program: what it reads is given, what it writes comes back.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace oscar {

struct ProgramResult {
  int status = 0;  // exit code; 128 and the signal's number where a signal ended it
  std::string out;
  std::string err;  // its last 64 KiB
};

// Runs `command` (a path, or a name looked up in PATH, and its arguments) with `input` as its
// standard input and returns when it has ended. `environment` has NAME=VALUE entries beside or in
// place of this process' own. Throws Error when it cannot be started, and Interrupted when a stop
// was requested meanwhile: the program is ended then.
ProgramResult run_program(const std::vector<std::string>& command, std::string_view input,
                          const std::vector<std::string>& environment = {});

}  // namespace oscar
