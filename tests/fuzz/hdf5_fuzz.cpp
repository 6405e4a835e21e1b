// HDF5 files as bundles and as token ids. libhdf5 checks files in a child process, where a crash is
// an answer: what this program looks for is what gets past that.
//
// A child for every check (oscar/base/sandbox.h) would leave 15 inputs a second. Here one child
// has 1,000 inputs, each before this process reads it: it makes the same checks, and leaves in
// shared memory how each has ended. The linker puts check_beside_child in place of run_in_sandbox
// (CMakeLists.txt).
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "fuzz_case.h"
#include "oscar/base/sandbox.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/decode.h"
#include "oscar/io/hdf5_internal.h"

namespace oscar::fuzz {
namespace {

constexpr int kInputsOfAChild = 1000;
constexpr int kSecondsOfAnInput = 15;
constexpr size_t kDatasetsAsIds = 2;

const char* input_path() {
  static const std::string path = scratch_folder() / "input.h5";
  return path.c_str();
}

// Each opening of a file takes half a MiB, which libhdf5 would give back, and the system clear
// anew.
bool keep_freed_memory() {
  constexpr int kOfAKind = 4 << 20, kOfAll = 16 << 20;
  hdf5::initialise_library();
  return H5set_free_list_limits(kOfAll, kOfAKind, kOfAll, kOfAKind, kOfAll, kOfAKind) >= 0;
}

bool is_child = false;

// Ends a reading in the child, which is there for its check alone.
struct Checked {};
bool ends_when_checked = false;

// Whether `work`, whose file is checked once, did not refuse; false in the child.
template <typename Work>
bool accepted_here(const Work& work) {
  ends_when_checked = is_child;
  try {
    return accepted(work) && !is_child;
  } catch (const Checked&) {
    return false;
  }
}

// The next outcome here is the last one again.
void child_check_again();

// What is done with the file at input_path().
void read_file() {
  bool good = true;
  accepted_here([&] {
    const auto findings = must("verify", [] { return verify_bundle(input_path()); });
    for (const Finding& finding : findings) good = good && finding.ok;
  });
  if (!is_child) {  // the same check once more
    child_check_again();
    const bool read = accepted([] { read_bundle(input_path()); });
    require(good || !read, "a bundle is read that is not verified");
  }
  ends_when_checked = false;
  const InputFile input(input_path());
  std::vector<hdf5::ObjectInfo> datasets = hdf5::list_datasets(input);
  if (datasets.size() > kDatasetsAsIds) datasets.resize(kDatasetsAsIds);  // each walks all objects
  for (const hdf5::ObjectInfo& object : datasets) {
    accepted_here([&] {
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

// How the checks of one input have ended, each with its length before it. Written by the child.
struct Outcomes {
  static constexpr size_t kMostBytes = size_t{1} << 20;
  size_t bytes = 0;
  std::array<char, kMostBytes> text{};

  void add(std::string_view outcome) {
    const auto length = static_cast<uint32_t>(outcome.size());
    if (kMostBytes - bytes < sizeof length + outcome.size()) ::_exit(1);
    std::memcpy(text.data() + bytes, &length, sizeof length);
    std::memcpy(text.data() + bytes + sizeof length, outcome.data(), outcome.size());
    bytes += sizeof length + outcome.size();
  }
  // The one at `place`, which is moved behind it.
  std::string read(size_t& place) const {
    uint32_t length = 0;
    std::memcpy(&length, text.data() + place, sizeof length);
    place += sizeof length + length;
    return {text.data() + place - length, length};
  }
};

Outcomes& outcomes() {
  static Outcomes* const shared = [] {
    void* const memory = ::mmap(nullptr, sizeof(Outcomes), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    return new (memory) Outcomes;
  }();
  return *shared;
}

// A byte that says that it is the other process's turn.
bool tell(int to) {
  ssize_t done = -1;
  do done = ::write(to, "", 1);
  while (done < 0 && errno == EINTR);
  return done == 1;
}

// False at the end of the stream, and when nothing came in time.
bool wait_for(int from, int seconds) {
  pollfd ready{from, POLLIN, 0};
  int found = -1;
  do found = ::poll(&ready, 1, seconds * 1000);
  while (found < 0 && errno == EINTR);
  char byte = 0;
  return found > 0 && ::read(from, &byte, 1) == 1;
}

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
  is_child = true;
  char begin = 0;
  while (::read(commands, &begin, 1) == 1) {
    accepted(read_file);
    if (!tell(report)) break;
  }
  ::_exit(0);
}

// The process that goes first over each input.
class Child {
 public:
  // Has it read the file that is there now, to its end or to that of the child.
  void read() {
    place_ = outcomes().bytes = 0;  // before the child begins, which shares them
    if (inputs_ >= kInputsOfAChild) stop();
    if (process_ <= 0) start();
    ++inputs_;
    lives_ = tell(commands_) && wait_for(ends_, kSecondsOfAnInput);
    if (!lives_) stop();
  }

  // How its next check has ended, as of outcome_of; nothing when it crashed or took too long.
  std::optional<std::string> next_outcome() {
    if (std::exchange(repeats_, false)) return last_;
    last_.reset();
    if (place_ < outcomes().bytes) {
      last_ = outcomes().read(place_);
    } else {
      require(!lives_, "two processes check one file in different ways");
    }
    return last_;
  }

  void repeat_outcome() { repeats_ = true; }

  // After the last check here.
  void require_same_checks() const {
    require(!lives_ || place_ == outcomes().bytes,
            "two processes check one file in different ways");
  }

 private:
  void start() {
    std::array<int, 2> commands{}, ends{};
    if (::pipe2(commands.data(), O_CLOEXEC) != 0 || ::pipe2(ends.data(), O_CLOEXEC) != 0) {
      std::abort();
    }
    std::signal(SIGPIPE, SIG_IGN);
    process_ = ::fork();
    if (process_ < 0) std::abort();
    if (process_ == 0) {
      ::close(commands[1]);
      ::close(ends[0]);
      run_child(commands[0], ends[1]);
    }
    ::close(commands[0]);
    ::close(ends[1]);
    commands_ = commands[1];
    ends_ = ends[0];
    inputs_ = 0;
  }

  void stop() {
    ::close(commands_);
    ::close(ends_);
    ::kill(process_, SIGKILL);
    while (::waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
    }
    process_ = 0;
  }

  pid_t process_ = 0;
  int commands_ = -1, ends_ = -1, inputs_ = 0;
  bool lives_ = false;  // did it read the last file to its end?
  size_t place_ = 0;    // of the next outcome
  bool repeats_ = false;
  std::optional<std::string> last_;
};

Child child;
void child_check_again() { child.repeat_outcome(); }

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
  if (is_child) {
    outcome = outcome_of(body);
    outcomes().add(*outcome);
  } else {
    outcome = child.next_outcome();
    count_reason(outcome ? *outcome : "a crash");
  }
  if (!outcome) throw Error({.what = "checking this file crashed", .where = where});
  if (!outcome->empty()) throw error_of(*outcome);
  if (ends_when_checked) throw Checked{};
}

const MemoryBound kMemoryBound{.fixed = size_t{16} << 20, .per_byte = 4096};

void read_untrusted(std::string_view bytes) {
  if (bytes.empty()) return;
  static const bool kept = keep_freed_memory();
  require(kept, "libhdf5 gives memory back");
  // A file of its own: libhdf5 knows one by its inode, also when an error left it open.
  ::unlink(input_path());
  scratch_file("input.h5", bytes);
  child.read();
  accepted(read_file);
  child.require_same_checks();
  require(checked, "files are checked without the child");
}

}  // namespace oscar::fuzz
