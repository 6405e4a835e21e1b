// A table that a signal handler can read.
#include "oscar/io/cut_files.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstring>

namespace oscar {
namespace {

// What a signal handler may read: maps by address. Those beyond the table are not named.
struct ListedMap {
  std::atomic<const std::byte*> begin = nullptr;
  std::atomic<size_t> bytes = 0;
  std::atomic<const char*> path = nullptr;
};
std::array<ListedMap, 1024> listed_maps;

void say(const char* text) {
  if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) return;  // nobody listens
}

void on_bus_error(int signal, siginfo_t* info, void*) {
  const auto* at = static_cast<const std::byte*>(info->si_addr);
  for (const ListedMap& map : listed_maps) {
    const std::byte* begin = map.begin;
    if (begin == nullptr || at < begin || at >= begin + map.bytes) continue;
    say("\na file was cut short, or its disk failed, while it was in use\n  where:    ");
    say(map.path);
    say("\n  hint:     run again when nothing writes to it\n");
    ::_exit(1);
  }
  std::signal(signal, SIG_DFL);  // the fault comes again, and ends the program
}

}  // namespace

void install_cut_file_handler() {
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, nullptr);
}

void name_map(const std::byte* begin, size_t bytes, const char* path) {
  for (ListedMap& map : listed_maps) {
    const char* none = nullptr;
    if (!map.path.compare_exchange_strong(none, path)) continue;
    map.bytes = bytes;
    map.begin = begin;
    return;
  }
}

void forget_map(const std::byte* begin) {
  for (ListedMap& map : listed_maps) {
    if (map.begin != begin) continue;
    map.begin = nullptr;
    map.path = nullptr;
    return;
  }
}

}  // namespace oscar
