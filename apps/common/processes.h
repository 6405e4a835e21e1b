// Several processes of one program on this machine: starting them, and what each says of how it
// ended.
#pragma once

#include <CLI/CLI.hpp>
#include <exception>
#include <functional>
#include <string>

#include "common/program.h"
#include "oscar/base/error.h"
#include "oscar/model/ranks.h"

namespace oscar::app {

// Several processes of one program on this machine: starting them.

// --gpus
void add_processes_option(CLI::App& program, int& processes);

// Runs this program so often, without --gpus, with the environment of torchrun; waits for all of
// them, and passes signals on. The exit code of the first that failed; that of process 0 where it
// did. Must come before anything is asked of a GPU. Throws Error for an end that a process could
// not tell itself (by a signal that was not passed on), with `hint` where that was process 0;
// UsageError when torchrun has started this process.
int run_processes(int processes, int argc, char** argv, const std::string& hint);

// What the processes of a run do, and what each says of how it ended.

inline constexpr const char* kResumeWithAny =
    "repeat the command with --resume, with any number of processes";

// Throws Error that names a process that was lost, with this hint.
inline void require_all(const Ranks& ranks, const std::string& hint) {
  const std::string lost = ranks.lost();
  if (!lost.empty()) throw Error({.what = lost, .hint = hint});
}

// Calls `first` in the first process and `other` in the others; the exit code. Where a process was
// lost the first stops and throws Error that names it, with this hint. An error of another is left
// to the first to report, and thrown here only where that one has gone.
inline int share_work(Ranks& ranks, const std::string& hint, const std::function<int()>& first,
                      const std::function<void(Progress& silent)>& other) {
  if (ranks.first()) {
    try {
      return first();
    } catch (const Interrupted&) {
      require_all(ranks, hint);
      throw;
    } catch (...) {
      ranks.failed();
      throw;
    }
  }
  SilentProgress silent;
  try {
    other(silent);
  } catch (const std::exception& error) {
    if (ranks.first_failed()) return kExitFailed;
    require_all(ranks, hint);
    if (dynamic_cast<const Interrupted*>(&error) != nullptr) {
      ranks.stopped();
      return kExitInterrupted;
    }
    ranks.report(error.what());
    return kExitFailed;
  }
  return kExitDone;
}

// Behind the device of a dry run; "" of one process.
inline std::string processes_text(const Ranks& ranks) {
  return ranks.several() ? "; " + std::to_string(ranks.size()) + " processes" : "";
}

}  // namespace oscar::app
