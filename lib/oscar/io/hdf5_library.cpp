// libhdf5 as a whole: its start, its messages, and what happens where it ends the program.
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "oscar/base/error.h"
#include "oscar/base/temporary.h"
#include "oscar/io/hdf5_internal.h"

namespace oscar::hdf5 {
namespace {

herr_t keep_message(unsigned, const H5E_error2_t* entry, void* text) {
  if (entry->desc != nullptr) *static_cast<std::string*>(text) = entry->desc;
  return 0;
}

// Of a failed system call the library tells times and addresses too: what the system said is kept.
std::string innermost_message() {
  std::string text;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep_message, &text);
  H5Eclear2(H5E_DEFAULT);
  constexpr std::string_view kSystem = "error message = '";
  const size_t begin = text.find(kSystem);
  if (begin == std::string::npos) return text;
  text.erase(0, begin + kSystem.size());
  return text.substr(0, text.find('\''));
}

// Handles that live: while there are any, or an output is unfinished, nothing of ours calls exit().
std::atomic<int>& live_handles() {
  static std::atomic<int> count{0};
  return count;
}

// libhdf5 calls exit(-1) where it finds no memory for an identifier (H5I_register).
void end_as_an_error(int status, void*) {
  if (status != -1 || (!remove_unfinished() && live_handles() == 0)) return;
  constexpr std::string_view kMessage =
      "not enough memory: libhdf5 ended the program, which leaves no new file\n";
  const ssize_t written = ::write(STDERR_FILENO, kMessage.data(), kMessage.size());
  static_cast<void>(written);
  ::_exit(EXIT_FAILURE);
}

}  // namespace

void count_handles(int more) { live_handles() += more; }

void initialise_library() {
  static const bool done = [] {
    ::on_exit(end_as_an_error, nullptr);
    H5dont_atexit();
    H5open();
    H5PLset_loading_state(0);
    return true;
  }();
  // Libraries that are safe for threads print in each that was not told.
  static thread_local const bool quiet = H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr) >= 0;
  (void)done;
  (void)quiet;
}

void fail(const std::string& what, const std::string& file, const std::string& object) {
  const std::string found = innermost_message();
  const bool full = found == std::strerror(ENOSPC) || found == std::strerror(EDQUOT) ||
                    found == std::strerror(EFBIG);
  throw Error({.what = what,
               .where = object.empty() ? file : file + ": " + object,
               .found = found,
               .hint = full ? "free some space or choose another folder" : ""});
}

}  // namespace oscar::hdf5
