// Several processes of one program on this machine: starting them.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace oscar::app {

// --gpus
void add_processes_option(CLI::App& program, int& processes);

// Runs this program so often, without --gpus, with the environment of torchrun; waits for all of
// them, and passes signals on. The exit code of the first that failed; that of process 0 where it
// did. Must come before anything is asked of a GPU. Throws Error for an end that a process could
// not tell itself (by a signal that was not passed on), with `hint` where that was process 0;
// UsageError when torchrun has started this process.
int run_processes(int processes, int argc, char** argv, const std::string& hint);

}  // namespace oscar::app
