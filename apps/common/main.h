// What every main does around its work: parse, run, and turn exceptions into messages and exit
// codes.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "oscar/base/usage_error.h"

namespace oscar::app {

inline constexpr int kExitDone = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitInterrupted = 130;  // as shells report SIGINT

// Parses the command line and calls `work`, which returns an exit code. Adds --version and a help
// layout for 80 columns. Usage errors give 2, a stop on request 130; every other exception is
// caught here, once, and gives 1, and so does standard output that could not be written.
int run_program(CLI::App& program, int argc, char** argv, const std::function<int()>& work);

}  // namespace oscar::app
