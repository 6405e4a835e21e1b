// fork, exec and wait.
#include "common/processes.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <string_view>
#include <system_error>
#include <vector>

#include "common/main.h"
#include "common/standard_streams.h"

namespace oscar::app {
namespace {

constexpr const char* kOption = "--gpus";
constexpr const char* kLoopback = "127.0.0.1";
constexpr int kMostProcesses = 8;  // as many as there are blocks

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

}  // namespace

void add_processes_option(CLI::App& program, int& processes) {
  program
      .add_option(kOption, processes,
                  "Share the work among so many GPUs of this machine, each with a process\n"
                  "of its own; with --device cpu, among so many processes")
      ->check(CLI::Range(1, kMostProcesses))
      ->capture_default_str()
      ->group("Machine");
}

int run_processes(int processes, int argc, char** argv) {
  if (std::getenv("WORLD_SIZE") != nullptr) {
    throw UsageError({.what = "torchrun has started this process already: leave --gpus out"});
  }
  const std::vector<char*> command = without_option(argc, argv);
  ::setenv("MASTER_ADDR", kLoopback, 1);
  ::setenv("MASTER_PORT", std::to_string(free_port()).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(processes).c_str(), 1);
  ::setenv("LOCAL_WORLD_SIZE", std::to_string(processes).c_str(), 1);
  sigset_t waited, before;
  ::sigemptyset(&waited);
  for (const int signal : kPassedOn) ::sigaddset(&waited, signal);
  ::sigaddset(&waited, SIGCHLD);
  ::sigprocmask(SIG_BLOCK, &waited, &before);
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
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    ::execv("/proc/self/exe", command.data());
    ::_exit(kExitFailed);
  }
  std::vector<int> codes(children.size(), kExitDone);
  int ended_by_signal = kExitFailed;
  for (size_t left = children.size(); left > 0;) {
    int signal = 0;
    ::sigwait(&waited, &signal);
    if (signal != SIGCHLD) {
      for (const pid_t child : children) {
        if (child > 0) ::kill(child, signal);
      }
      ended_by_signal = kExitInterrupted;
      continue;
    }
    for (size_t i = 0; i < children.size(); ++i) {
      int status = 0;
      if (children[i] <= 0 || ::waitpid(children[i], &status, WNOHANG) != children[i]) continue;
      children[i] = 0;
      --left;
      codes[i] = WIFEXITED(status) ? WEXITSTATUS(status) : ended_by_signal;
    }
  }
  for (const int code : codes) {
    if (code != kExitDone) return code;
  }
  return kExitDone;
}

}  // namespace oscar::app
