// A request to stop (SIGINT, SIGTERM, SIGHUP, SIGXFSZ), set by the handler and polled between units
// of work.
#pragma once

namespace oscar {

// Seconds after which a request that nobody has noticed ends the process.
inline constexpr unsigned kStopPatience = 4;

// Installs handlers that set the flag. The process ends at once on a second signal, and when the
// first has not been noticed after kStopPatience seconds (it waits, or is in the middle of long
// work): exit code 130, and what is on disk is as a kill leaves it. SIGHUP stays ignored where it
// was ignored (nohup). SIGXFSZ is a failed write, which says so itself: it is ignored.
void install_interrupt_handlers();

// True from the first signal on. Noticing it ends the patience: what follows may take its time.
bool interrupt_requested();

// As a signal would, for a reason of the program's own: with no end at once.
void request_stop();

// What Interrupted says where nothing more is known.
inline constexpr const char* kStopped = "stopped on request";

// Throws Interrupted, saying `what`, when a stop was requested.
void stop_if_requested(const char* what = kStopped);

}  // namespace oscar
