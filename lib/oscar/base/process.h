// What the process may take of the machine: memory, threads, signals.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>

namespace oscar {

// What the memory limit of a container leaves.

inline constexpr int64_t kNoMemoryLimit = std::numeric_limits<int64_t>::max();

// Bytes that this process' control group and those above it still allow, without what they can drop
// (pages of files); kNoMemoryLimit where none of them has a limit. `membership` says which they
// are, and `mount` has them, as version 2 or version 1 of Linux' control groups.
int64_t control_group_memory(const std::filesystem::path& membership = "/proc/self/cgroup",
                             const std::filesystem::path& mount = "/sys/fs/cgroup");

// What malloc keeps of freed memory, given back to the system.

// All of it: a call walks the heap, and what is asked for next is mapped anew.
void give_back_freed_memory();

// Only where much is kept (kMuchKept). Called before each step of work whose memory is planned, it
// bounds what a process has beyond what it uses, for some 3 to 8% of its time.
void give_back_much_freed_memory();

// A request to stop (SIGINT, SIGTERM, SIGHUP, SIGXFSZ), set by the handler and polled between units
// of work.

// Seconds after which a request that nobody has noticed ends the process.
inline constexpr unsigned kStopPatience = 4;

// Milliseconds within which further signals are the same request: torchrun, timeout and a service
// manager that stops a group send it once more to processes that have it already.
inline constexpr int kOneRequest = 1000;

// Installs handlers that set the flag. The process ends at once on a signal that comes kOneRequest
// or more after the first one, of that signal; and with exit code 130 when the first has not been
// noticed after kStopPatience seconds (it waits, or is in the middle of long work), or where a
// signal of its own cannot end it (process 1 of a container). What is on disk is then as a kill
// leaves it. SIGHUP stays ignored where it was ignored (nohup). SIGXFSZ is a failed write, which
// says so itself: it is ignored.
void install_interrupt_handlers();

// True from the first signal on, in every thread. Noticing it ends the patience: what follows may
// take its time.
bool interrupt_requested();

// While one lives, a request may wait for the end of what is under way, so that it counts: it
// ends the process only where it is made again. Nothing where the work ends before kStopPatience.
class TakesItsTime {
 public:
  TakesItsTime();
  ~TakesItsTime();
  TakesItsTime(const TakesItsTime&) = delete;
  TakesItsTime& operator=(const TakesItsTime&) = delete;
};

// The same without noticing it: nothing is ended by it.
bool stop_pending();

// As a signal would, for a reason of the program's own: with no end at once, nor by the first
// signal that follows.
void request_stop();

// What Interrupted says where nothing more is known.
inline constexpr const char* kStopped = "stopped on request";

// Throws Interrupted, saying `what`, when a stop was requested.
void stop_if_requested(const char* what = kStopped);

// Loops whose steps run side by side on the processor's cores.

// Calls work(0) to work(count - 1), in the calling thread and in others beside it, and returns when
// all have ended. A process has as many threads as it may use cores, over all calls: one within
// another takes what is left, which may be none, so loops can be nested freely. (What a bundle's
// writing does beside them waits for the disk, and is not counted.) What a step does must not
// depend on the others. When steps throw, later ones are not begun, and the exception of the first
// in order is thrown. `most_threads`: for work that more threads do no faster.
void parallel_for(int64_t count, const std::function<void(int64_t)>& work,
                  int64_t most_threads = std::numeric_limits<int64_t>::max());

// The cores of a process: at least 1.
int64_t parallel_cores();

}  // namespace oscar
