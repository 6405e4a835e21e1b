// HDF5 files as bundles and as token ids. libhdf5 checks files in a child process, where a crash is
// an answer: what this program looks for is what gets past that.
//
// A child for every check (oscar/base/sandbox.h) would leave 15 inputs a second. Here one child
// reads 1,000 inputs in step with this process: it does all of the same work, and tells how each
// check has ended. The linker puts check_beside_child in place of run_in_sandbox (CMakeLists.txt).
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <optional>

#include "fuzz_case.h"
#include "oscar/base/sandbox.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/verify.h"
#include "oscar/io/hdf5.h"

namespace oscar::fuzz {
namespace {

constexpr int kInputsOfAChild = 1000;
constexpr int kSecondsOfACheck = 15;
constexpr size_t kDatasetsAsIds = 4;
constexpr uint32_t kEndOfInput = UINT32_MAX;  // in place of the length of an outcome

const char* input_path() {
  static const std::string path = scratch_folder() / "input.h5";
  return path.c_str();
}

// What is done with the file at input_path().
void read_file() {
  const auto findings = must("verify", [] { return verify_bundle(input_path()); });
  bool good = true;
  for (const Finding& finding : findings) good = good && finding.ok;
  const bool read = accepted([] { read_bundle(input_path()); });
  require(good || !read, "a bundle is read that is not verified");
  const InputFile input(input_path());
  std::vector<hdf5::ObjectInfo> datasets = hdf5::list_datasets(input);
  if (datasets.size() > kDatasetsAsIds) datasets.resize(kDatasetsAsIds);  // each walks all objects
  for (const hdf5::ObjectInfo& object : datasets) {
    accepted([&] {
      const auto ids = hdf5::read_integers(input, object.path, 100);
      require(ids.values.size() == hdf5::element_count(ids.shape), "another number of ids");
    });
  }
}

// Parts of an Error, each with a NUL behind it; empty when `body` returns.
std::string outcome_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    const ErrorInfo& info = error.info();
    std::string text;
    for (const auto* part : {&info.what, &info.where, &info.expected, &info.found, &info.hint}) {
      text += *part + '\0';
    }
    return text;
  } catch (const std::exception& error) {
    return error.what() + std::string(5, '\0');
  }
  return {};
}

Error error_of(std::string_view outcome) {
  std::array<std::string, 5> parts;
  for (std::string& part : parts) {
    const auto [text, rest] = cut_at_nul(outcome);
    part = text;
    outcome = rest;
  }
  return Error({parts[0], parts[1], parts[2], parts[3], parts[4]});
}

bool write_all(int to, const void* bytes, size_t count) {
  for (const char* at = static_cast<const char*>(bytes); count > 0;) {
    const ssize_t done = ::write(to, at, count);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    at += done;
    count -= static_cast<size_t>(done);
  }
  return true;
}

// False at the end of the stream, and when nothing came in time.
bool read_all(int from, void* bytes, size_t count) {
  for (char* at = static_cast<char*>(bytes); count > 0;) {
    pollfd ready{from, POLLIN, 0};
    const int found = ::poll(&ready, 1, kSecondsOfACheck * 1000);
    if (found < 0 && errno == EINTR) continue;
    if (found <= 0) return false;
    const ssize_t done = ::read(from, at, count);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    at += done;
    count -= static_cast<size_t>(done);
  }
  return true;
}

// Set in the child: where its outcomes go.
int report_to = -1;

[[noreturn]] void run_child(int commands, int report) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (const int number : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGINT, SIGTERM}) {
    std::signal(number, SIG_DFL);
  }
  const int silent = ::open("/dev/null", O_WRONLY);
  if (silent >= 0) ::dup2(silent, STDERR_FILENO);
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_CORE, &none);
  end_without_findings();
  report_to = report;
  char begin = 0;
  while (::read(commands, &begin, 1) == 1) {
    accepted(read_file);
    if (!write_all(report, &kEndOfInput, sizeof kEndOfInput)) break;
  }
  ::_exit(0);
}

// The process that goes first over each input.
class Child {
 public:
  // Has it read the file that is there now.
  void begin() {
    if (inputs_ >= kInputsOfAChild) stop();
    if (process_ <= 0) start();
    ++inputs_;
    reading_ = write_all(commands_, "", 1);
  }

  // How its next check has ended, as of outcome_of; nothing when it crashed or took too long.
  std::optional<std::string> next_outcome() {
    if (!reading_) return std::nullopt;
    uint32_t length = 0;
    if (!read_all(outcomes_, &length, sizeof length)) return crashed();
    require(length != kEndOfInput, "two processes check one file in different ways");
    std::string text(length, '\0');
    if (!read_all(outcomes_, text.data(), length)) return crashed();
    return text;
  }

  // Waits until it has read the file.
  void end() {
    if (!reading_) return;
    uint32_t length = 0;
    const bool alive = read_all(outcomes_, &length, sizeof length);
    require(!alive || length == kEndOfInput, "two processes check one file in different ways");
    if (!alive) crashed();
  }

 private:
  void start() {
    std::array<int, 2> commands{}, outcomes{};
    if (::pipe2(commands.data(), O_CLOEXEC) != 0 || ::pipe2(outcomes.data(), O_CLOEXEC) != 0) {
      std::abort();
    }
    std::signal(SIGPIPE, SIG_IGN);
    process_ = ::fork();
    if (process_ < 0) std::abort();
    if (process_ == 0) {
      ::close(commands[1]);
      ::close(outcomes[0]);
      run_child(commands[0], outcomes[1]);
    }
    ::close(commands[0]);
    ::close(outcomes[1]);
    commands_ = commands[1];
    outcomes_ = outcomes[0];
    inputs_ = 0;
  }

  void stop() {
    ::close(commands_);
    ::close(outcomes_);
    ::kill(process_, SIGKILL);
    while (::waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
    }
    process_ = 0;
    reading_ = false;
  }

  std::nullopt_t crashed() {
    stop();
    return std::nullopt;
  }

  pid_t process_ = 0;
  int commands_ = -1, outcomes_ = -1, inputs_ = 0;
  bool reading_ = false;
};

Child child;
bool checked = false;  // has any file come to the function below?

// Read by libFuzzer, beside the coverage: inputs that are refused for another reason are new. The
// child's own coverage is not seen.
constexpr size_t kReasons = 1024;
__attribute__((section("__libfuzzer_extra_counters"))) std::array<uint8_t, kReasons> reasons;

void count_reason(std::string_view outcome) {
  const auto [what, rest] = cut_at_nul(outcome);
  std::string words;  // names and numbers would make each input new
  for (const char c : what) {
    if (c < '0' || c > '9') words += c;
  }
  reasons[std::hash<std::string>()(words) % kReasons] = 1;
}

}  // namespace

void check_beside_child(const std::string& where, const SandboxLimits&,
                        const std::function<void()>& body) asm("__wrap_" OSCAR_RUN_IN_SANDBOX);

void check_beside_child(const std::string& where, const SandboxLimits&,
                        const std::function<void()>& body) {
  checked = true;
  std::optional<std::string> outcome;
  if (report_to >= 0) {
    outcome = outcome_of(body);
    const auto length = static_cast<uint32_t>(outcome->size());
    if (!write_all(report_to, &length, sizeof length) ||
        !write_all(report_to, outcome->data(), length)) {
      ::_exit(0);
    }
  } else {
    outcome = child.next_outcome();
    count_reason(outcome ? *outcome : "a crash");
  }
  if (!outcome) throw Error({.what = "checking this file crashed", .where = where});
  if (!outcome->empty()) throw error_of(*outcome);
}

const MemoryBound kMemoryBound{.fixed = size_t{16} << 20, .per_byte = 4096};

void read_untrusted(std::string_view bytes) {
  if (bytes.empty()) return;
  // A file of its own: libhdf5 knows one by its inode, also when an error left it open.
  ::unlink(input_path());
  scratch_file("input.h5", bytes);
  child.begin();
  accepted(read_file);
  child.end();
  require(checked, "files are checked without the child");
}

}  // namespace oscar::fuzz
