// A request to stop (SIGINT, SIGTERM), set by the handler and polled between units of work.
#pragma once

namespace oscar {

// Installs handlers that set the flag; a second signal ends the process at once.
void install_interrupt_handlers();
bool interrupt_requested();

// What Interrupted says where nothing more is known.
inline constexpr const char* kStopped = "stopped on request";

// Throws Interrupted, saying `what`, when a stop was requested.
void stop_if_requested(const char* what = kStopped);

}  // namespace oscar
