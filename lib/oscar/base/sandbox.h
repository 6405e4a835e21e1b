// Runs code on untrusted bytes in a child process with limits, where a crash becomes a message.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace oscar {

struct SandboxLimits {
  uint64_t extra_memory_bytes = uint64_t{1} << 30;  // address space beyond what the parent has
  uint64_t cpu_seconds = 60;
};

// Forks, applies the limits and calls `body` in the child. Returns when it returned. Throws the
// Error that it threw, or an Error saying that reading `where` crashed or ran past a limit.
// The child shares nothing back: run `body` for its checks alone. It must not need other threads.
void run_in_sandbox(const std::string& where, const SandboxLimits& limits,
                    const std::function<void()>& body);

}  // namespace oscar
