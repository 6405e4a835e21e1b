// Output folders that appear whole or not at all: filled beside their place, flushed, renamed.
#pragma once

#include <filesystem>
#include <optional>

#include "oscar/base/temporary.h"

namespace oscar {

// Owns a temporary folder beside `target`; removed with all it holds unless committed.
class AtomicFolder {
 public:
  // Throws Error when `target` exists, the folder around it is missing or not writable, or another
  // run is writing it.
  explicit AtomicFolder(const std::filesystem::path& target);
  ~AtomicFolder();
  AtomicFolder(const AtomicFolder&) = delete;
  AtomicFolder& operator=(const AtomicFolder&) = delete;

  const std::filesystem::path& target() const { return target_; }
  std::filesystem::path temporary() const { return folder_->path(); }
  // Flushes what was written to disk, takes the place and flushes the folder around it. Throws
  // Error on any failure, and when the target exists by now.
  void commit();

 private:
  std::filesystem::path target_;
  std::optional<Temporary> folder_;
};

}  // namespace oscar
