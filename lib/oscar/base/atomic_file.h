// Output files that appear whole or not at all: written beside their place, flushed, renamed.
#pragma once

#include <filesystem>
#include <string_view>

namespace oscar {

// Throws Error with what `errno` says of `path`, and a way out of a full disk or a folder that may
// not be written.
[[noreturn]] void throw_file_error(const char* what, const std::filesystem::path& path);

// Makes a rename within the folder around `path` survive a crash. Throws Error on failure.
void flush_parent_folder(const std::filesystem::path& path);

// Owns a temporary name in the folder of `target`; removed on destruction unless committed.
class AtomicFile {
 public:
  // Throws Error when `target` is empty or a folder, or its folder is missing or not writable.
  explicit AtomicFile(std::filesystem::path target);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::filesystem::path& temporary() const { return temporary_; }
  // Flushes the temporary file and its folder to disk and renames it to the target.
  // Throws Error on any failure (a full disk shows here); the target is then untouched.
  void commit();

 private:
  std::filesystem::path target_, temporary_;
};

// Writes `content` to `target` atomically.
void write_file_atomically(const std::filesystem::path& target, std::string_view content);

}  // namespace oscar
