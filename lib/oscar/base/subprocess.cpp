// Running another program: what it reads is given, what it writes comes back.
#include "oscar/base/subprocess.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/process.h"

namespace oscar {
namespace {

[[noreturn]] void fail(const std::string& program, int reason) {
  throw Error({.what = "cannot run a program", .where = program, .found = std::strerror(reason)});
}

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }
  void close() {
    if (number_ >= 0) ::close(std::exchange(number_, -1));
  }

 private:
  int number_;
};

// A running child; ended where it is not waited for.
class Child {
 public:
  explicit Child(pid_t id) : id_(id) {}
  ~Child() {
    if (id_ <= 0) return;
    ::kill(id_, SIGKILL);
    wait();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  int wait() {
    int status = 0;
    while (::waitpid(id_, &status, 0) < 0 && errno == EINTR) {
    }
    id_ = 0;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  pid_t id_;
};

// A file without a name: nobody waits for the other's end of it, as with a pipe.
int memory_file(const std::string& program) {
  const int number = ::memfd_create("oscar", MFD_CLOEXEC);
  if (number < 0) fail(program, errno);
  return number;
}

void write_all(int to, std::string_view bytes, const std::string& program) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(to, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(program, errno);
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  ::lseek(to, 0, SEEK_SET);
}

std::string read_tail(int from) {
  constexpr off_t kMost = off_t{1} << 16;
  const off_t size = std::max<off_t>(::lseek(from, 0, SEEK_END), 0);
  std::string text(static_cast<size_t>(std::min(size, kMost)), '\0');
  const ssize_t count =
      ::pread(from, text.data(), text.size(), size - static_cast<off_t>(text.size()));
  text.resize(count > 0 ? static_cast<size_t>(count) : 0);
  return text;
}

std::string read_to_end(int from, const std::string& program) {
  std::string text;
  std::array<char, size_t{1} << 16> block;
  while (true) {
    stop_if_requested();
    const ssize_t count = ::read(from, block.data(), block.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(program, errno);
    if (count == 0) return text;
    text.append(block.data(), static_cast<size_t>(count));
  }
}

// "NAME=VALUE" entries: this process' own but those that are set anew, and these.
std::vector<char*> pointers_to_environment(std::vector<std::string>& set) {
  std::vector<char*> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::string_view name = text.substr(0, text.find('=') + 1);
    const bool anew =
        std::ranges::any_of(set, [&](const std::string& other) { return other.starts_with(name); });
    if (!anew) entries.push_back(*entry);
  }
  for (std::string& entry : set) entries.push_back(entry.data());
  entries.push_back(nullptr);
  return entries;
}

}  // namespace

ProgramResult run_program(const std::vector<std::string>& command, std::string_view input,
                          const std::vector<std::string>& environment) {
  const std::string& program = command.at(0);
  const Descriptor in(memory_file(program)), err(memory_file(program));
  write_all(in.number(), input, program);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail(program, errno);
  const Descriptor out(ends[0]);
  Descriptor write_end(ends[1]);

  std::vector<std::string> words = command, set = environment;
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const std::vector<char*> variables = pointers_to_environment(set);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, in.number(), STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, write_end.number(), STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, err.number(), STDERR_FILENO);
  pid_t id = 0;
  const int failed =
      ::posix_spawnp(&id, program.c_str(), &actions, nullptr, arguments.data(), variables.data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) fail(program, failed);
  Child child(id);
  write_end.close();
  ProgramResult result;
  result.out = read_to_end(out.number(), program);
  result.status = child.wait();
  stop_if_requested();  // which may be what ended it
  result.err = read_tail(err.number());
  return result;
}

}  // namespace oscar
