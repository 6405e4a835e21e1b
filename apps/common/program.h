// What every main does around its work: parse, run, turn exceptions into messages and exit codes;
// what a wrong command line is told; man page and completion.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "oscar/base/error.h"

namespace oscar::app {

// What a wrong command line is told: unknown words first, with the nearest known one.

// What to say of the first word of a failed command line that the program does not know; "" when
// it knows them all. Call it after program.parse() has thrown: a word that is missing is often one
// that stands behind a misspelt option.
std::string unknown_word(const CLI::App& program);

// Man page and completion of a program, made from its options.

// In roff, section 1. `version` stands in its footer.
std::string man_page(const CLI::App& program, const std::string& version);

// Completes commands, options and the values of those that have a fixed set; files elsewhere.
std::string bash_completion(const CLI::App& program);

// What every main does around its work: parse, run, and turn exceptions into messages and exit
// codes.

inline constexpr int kExitDone = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitInterrupted = 130;  // as shells report SIGINT

// Parses the command line and calls `work`, which returns an exit code. Adds --version and a help
// layout for 80 columns. Usage errors give 2, a stop on request 130; every other exception is
// caught here, once, and gives 1, and so does standard output that could not be written.
int run_program(CLI::App& program, int argc, char** argv, const std::function<int()>& work);

}  // namespace oscar::app
