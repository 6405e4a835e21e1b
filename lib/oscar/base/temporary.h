// A temporary file or folder beside the place that it will take, which is also the lock on that
// place.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "oscar/base/input_file.h"

namespace oscar {

// Whether an output takes a place where something stands: never, only while that is what stood
// there at first, or always.
enum class Replace { kNo, kIfUnchanged, kYes };

// Throws Error with what `errno` says of `path`, and a way out of a full disk or a folder that may
// not be written.
[[noreturn]] void throw_file_error(const char* what, const std::filesystem::path& path);

// A file or folder on its way, by its name: known to remove_unfinished() as long as this lives.
class Unfinished {
 public:
  explicit Unfinished(std::filesystem::path path);
  ~Unfinished();
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;

 private:
  friend bool remove_unfinished() noexcept;
  std::filesystem::path path_;
  int process_;  // children have the list too
};

// Removes what this process has not finished, when a library ends it by calling exit(): destructors
// do not run then. Whether there was anything.
bool remove_unfinished() noexcept;

// Named TARGET.<16 random digits>.tmp, made anew, and held by one descriptor until it is published;
// removed otherwise. The descriptor is locked (flock), by which others see that a run lives: of two
// runs with one target the second one is refused, and what killed runs have left is removed by the
// next one. File systems without locks leave both out, and lose nothing else.
class Temporary {
 public:
  enum class Kind { kFile, kFolder };

  // Throws Error when the folder around `target` is missing or not writable, or another run is
  // writing the same target.
  Temporary(const std::filesystem::path& target, Kind kind);
  ~Temporary();
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;

  int descriptor() const { return descriptor_; }
  std::filesystem::path path() const { return target_.parent_path() / name_; }
  // Flushes to disk, takes the place, and flushes the folder around it. Throws Error on any
  // failure, and when `replace` does not allow it; what stood there is then untouched.
  void publish(Replace replace);

 private:
  bool create();
  bool sole_writer() const;
  void remove();
  void take_place(Replace replace) const;

  std::filesystem::path target_;  // with a folder: "./a" for "a"
  Kind kind_;
  std::optional<FileIdentity> before_;  // what stood at the target
  std::string name_;                    // within the folder; empty: published or not made
  std::optional<Unfinished> unfinished_;
  int folder_ = -1, descriptor_ = -1;
};

}  // namespace oscar
