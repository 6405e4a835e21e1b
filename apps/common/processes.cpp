// Several processes of one program on this machine: starting them, and what each says of how it
// ended.
#include "common/processes.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string_view>
#include <system_error>
#include <vector>

#include "common/program.h"
#include "common/terminal.h"
#include "oscar/model/ranks.h"

namespace oscar::app {

// fork, exec and wait.

namespace {

constexpr const char* kOption = "--gpus";
constexpr const char* kLoopback = "127.0.0.1";

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// One that is free now.
int free_port() {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0) fail("socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  ::inet_pton(AF_INET, kLoopback, &address.sin_addr);
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (::bind(listener, any, size) != 0 || ::getsockname(listener, any, &size) != 0) fail("bind");
  ::close(listener);
  return ntohs(address.sin_port);
}

// The command line without --gpus.
std::vector<char*> without_option(int argc, char** argv) {
  std::vector<char*> rest;
  for (int i = 0; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == kOption) {
      ++i;
    } else if (!word.starts_with(std::string(kOption) + "=")) {
      rest.push_back(argv[i]);
    }
  }
  rest.push_back(nullptr);
  return rest;
}

constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP};

bool exited(int status, int code) { return WIFEXITED(status) && WEXITSTATUS(status) == code; }

bool is_passed_on(int signal) {
  return std::ranges::find(kPassedOn, signal) != std::end(kPassedOn);
}

// Throws Error for an end that the process could not tell itself: by a signal, unless that was
// passed on to stop it; or with an error when the first, which tells those of the others, had left.
// `hint`: where the first was ended.
void require_told(const std::vector<int>& statuses, bool stopping, const std::string& hint) {
  const bool first_done = exited(statuses.front(), kExitDone);
  for (size_t i = 0; i < statuses.size(); ++i) {
    const int status = statuses[i];
    const bool killed = WIFSIGNALED(status) && !(stopping && is_passed_on(WTERMSIG(status)));
    const bool untold = WIFEXITED(status) && first_done && !exited(status, kExitDone);
    if (!killed && (!untold || stopping)) continue;
    const std::string how = killed ? fmt::format("was ended by signal {} ({})", WTERMSIG(status),
                                                 strsignal(WTERMSIG(status)))
                                   : fmt::format("ended with exit code {}", WEXITSTATUS(status));
    throw Error({.what = fmt::format("process {} of {} {}", i, statuses.size(), how),
                 .found = first_done ? "process 0 has done all that was asked for" : "",
                 .hint = WIFSIGNALED(statuses.front()) ? hint : ""});
  }
}

}  // namespace

void add_processes_option(CLI::App& program, int& processes) {
  program
      .add_option(kOption, processes,
                  "Share the work among so many GPUs of this machine, each with a process of its "
                  "own; with --device cpu, among so many processes")
      ->check(CLI::Range(1, kMostProcesses))
      ->capture_default_str()
      ->group("Machine");
}

namespace {

// Runs `command` once for each rank, with the signals of `mask` held back as they were before.
std::vector<pid_t> start_children(int processes, const std::vector<char*>& command,
                                  const sigset_t& mask) {
  const pid_t parent = ::getpid();
  std::vector<pid_t> children;
  for (int rank = 0; rank < processes; ++rank) {
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
    const pid_t child = ::fork();
    if (child < 0) {
      for (const pid_t other : children) ::kill(other, SIGTERM);
      fail("fork");
    }
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    ::setpgid(0, 0);  // a terminal's Ctrl-C comes from the parent alone
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(kExitFailed);
    ::sigprocmask(SIG_SETMASK, &mask, nullptr);
    ::execv("/proc/self/exe", command.data());
    say("{}: cannot start process {}: {}\n",
        std::filesystem::path(command.front()).filename().string(), rank, std::strerror(errno));
    ::_exit(kExitFailed);
  }
  return children;
}

// Passes signals on until all children have ended: their statuses, and whether one was passed on.
std::pair<std::vector<int>, bool> wait_for(std::vector<pid_t> children, const sigset_t& waited) {
  std::vector<int> statuses(children.size());
  bool stopping = false;
  for (size_t left = children.size(); left > 0;) {
    int signal = 0;
    ::sigwait(&waited, &signal);
    if (signal != SIGCHLD) {
      for (const pid_t child : children) {
        if (child > 0) ::kill(child, signal);
      }
      stopping = true;
      continue;
    }
    for (size_t i = 0; i < children.size(); ++i) {
      if (children[i] <= 0 || ::waitpid(children[i], &statuses[i], WNOHANG) != children[i]) {
        continue;
      }
      children[i] = 0;
      --left;
    }
  }
  return {std::move(statuses), stopping};
}

}  // namespace

int run_processes(int processes, int argc, char** argv, const std::string& hint) {
  if (std::getenv("WORLD_SIZE") != nullptr) {
    throw UsageError({.what = "torchrun has started this process already: leave --gpus out"});
  }
  const std::vector<char*> command = without_option(argc, argv);
  ::setenv("MASTER_ADDR", kLoopback, 1);
  ::setenv("MASTER_PORT", std::to_string(free_port()).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(processes).c_str(), 1);
  ::setenv("LOCAL_WORLD_SIZE", std::to_string(processes).c_str(), 1);
  std::signal(SIGCHLD, SIG_DFL);  // ignored, as some supervisors leave it, it would never come
  sigset_t waited, before;
  ::sigemptyset(&waited);
  for (const int signal : kPassedOn) ::sigaddset(&waited, signal);
  ::sigaddset(&waited, SIGCHLD);
  ::sigprocmask(SIG_BLOCK, &waited, &before);
  const std::vector<pid_t> children = start_children(processes, command, before);
  const auto [statuses, stopping] = wait_for(children, waited);
  require_told(statuses, stopping, hint);
  for (const int status : statuses) {
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : kExitInterrupted;
    if (code != kExitDone) return code;
  }
  return kExitDone;
}

}  // namespace oscar::app
