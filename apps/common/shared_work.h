// What the processes of a run do, and what each says of how it ended.
#pragma once

#include <exception>
#include <functional>
#include <string>

#include "common/main.h"
#include "oscar/base/progress.h"
#include "oscar/executor/ranks.h"

namespace oscar::app {

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
