// fork, rlimits, and a pipe that carries the child's Error back part by part.
#include "oscar/base/sandbox.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <new>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr int kExitError = 3;  // the pipe holds an Error; 0 means that all was well

void limit(int resource, uint64_t value) {
  rlimit now{};
  if (::getrlimit(static_cast<__rlimit_resource>(resource), &now) != 0) return;
  if (now.rlim_max != RLIM_INFINITY && now.rlim_max < value) value = now.rlim_max;
  now.rlim_cur = value;
  ::setrlimit(static_cast<__rlimit_resource>(resource), &now);
}

// Address space in use. The parent may have reserved far more than it touches (GPU runtimes and
// sanitizers do), so the limit is set on top of this.
uint64_t address_space_bytes() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

void write_all(int descriptor, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(descriptor, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    done += static_cast<size_t>(count);
  }
}

[[noreturn]] void run_child(int report, const SandboxLimits& limits,
                            const std::function<void()>& body) {
  for (const int number : {SIGINT, SIGTERM, SIGBUS}) std::signal(number, SIG_DFL);
  // A run that is killed leaves nothing behind that would hold its outputs.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // A crash is reported by the parent in one message; the library's own words would confuse.
  const int silent = ::open("/dev/null", O_WRONLY);
  if (silent >= 0) ::dup2(silent, STDERR_FILENO);
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_CPU, limits.cpu_seconds);
  const uint64_t in_use = address_space_bytes();
  if (in_use > 0) limit(RLIMIT_AS, in_use + limits.extra_memory_bytes);
  std::string text;
  try {
    body();
  } catch (const Error& error) {
    const ErrorInfo& info = error.info();
    for (const auto* part : {&info.what, &info.where, &info.expected, &info.found, &info.hint}) {
      text += *part + '\0';
    }
  } catch (const std::bad_alloc&) {
    text = std::string("reading this file needs more memory than its size allows for") + '\0';
  } catch (const std::exception& error) {
    text = std::string(error.what()) + '\0';
  }
  write_all(report, text);
  ::_exit(text.empty() ? 0 : kExitError);
}

std::string read_all(int descriptor) {
  std::string text;
  std::array<char, 4096> buffer;
  for (;;) {
    const ssize_t count = ::read(descriptor, buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return text;
    text.append(buffer.data(), static_cast<size_t>(count));
  }
}

Error received_error(const std::string& text, const std::string& where) {
  std::array<std::string, 5> parts;
  size_t begin = 0;
  for (auto& part : parts) {
    const size_t end = text.find('\0', begin);
    if (end == std::string::npos) break;
    part = text.substr(begin, end - begin);
    begin = end + 1;
  }
  return Error({.what = parts[0],
                .where = parts[1].empty() ? where : parts[1],
                .expected = parts[2],
                .found = parts[3],
                .hint = parts[4]});
}

}  // namespace

void run_in_sandbox(const std::string& where, const SandboxLimits& limits,
                    const std::function<void()>& body) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error({.what = "cannot open a pipe", .found = std::strerror(errno)});
  }
  const pid_t child = ::fork();
  if (child < 0) {
    const int code = errno;
    ::close(ends[0]);
    ::close(ends[1]);
    throw Error({.what = "cannot start a process to check an untrusted file",
                 .where = where,
                 .found = std::strerror(code)});
  }
  if (child == 0) {
    ::close(ends[0]);
    run_child(ends[1], limits, body);
  }
  ::close(ends[1]);
  const std::string text = read_all(ends[0]);
  ::close(ends[0]);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  if (WIFEXITED(status) && WEXITSTATUS(status) == kExitError) throw received_error(text, where);
  const bool out_of_time = WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU;
  throw Error({.what = out_of_time ? "checking this file took too long"
                                   : "checking this file crashed, so it is damaged or hostile",
               .where = where,
               .found = WIFSIGNALED(status) ? std::string("the checking process ended with ") +
                                                  ::strsignal(WTERMSIG(status))
                                            : "the checking process ended with status " +
                                                  std::to_string(WEXITSTATUS(status)),
               .hint = "fetch the file again from a source that you trust"});
}

}  // namespace oscar
