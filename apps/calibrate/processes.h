// Several processes of one program on this machine: starting them, and what those do that are not
// the first.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "oscar/base/progress.h"
#include "oscar/executor/ranks.h"

namespace oscar::app {

// --gpus
void add_processes_option(CLI::App& program, int& processes);

// Runs this program so often, without --gpus, with the environment of torchrun; waits for all of
// them, and passes signals on. The exit code of the first that failed; that of process 0 where it
// did. Must come before anything is asked of a GPU. Throws UsageError when torchrun has started
// this process.
int run_processes(int processes, int argc, char** argv);

// Calls `work` in a process that is not the first, and gives its exit code. An error is left to the
// first to report, and said here only where that one has gone.
int work_for_first(Ranks& ranks, const std::function<void(Progress& silent)>& work);

}  // namespace oscar::app
