// A request to stop (SIGINT, SIGTERM, SIGHUP, SIGXFSZ), set by the handler and polled between units
// of work.
#pragma once

namespace oscar {

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

}  // namespace oscar
