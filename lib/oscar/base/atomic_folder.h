// Output folders that appear whole or not at all: filled beside their place, flushed, renamed.
#pragma once

#include <filesystem>

namespace oscar {

// Owns a temporary folder beside `target`; removed with all it holds unless committed.
class AtomicFolder {
 public:
  // Throws Error when `target` exists, or the folder around it is missing or not writable.
  explicit AtomicFolder(const std::filesystem::path& target);
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;

  const std::filesystem::path& target() const { return target_; }
  const std::filesystem::path& temporary() const { return temporary_; }
  // Flushes what was written to disk, renames the folder and flushes the folder around it. Throws
  // Error on any failure.
  void commit();

 private:
  std::filesystem::path target_, temporary_;
};

}  // namespace oscar
