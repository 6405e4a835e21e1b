// Output files that appear whole or not at all: written beside their place, flushed, renamed.
#pragma once

#include <filesystem>
#include <string_view>

namespace oscar {

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
