// Files that are read: one descriptor from the first check to the last byte, and whether they
// change meanwhile.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace oscar {

// Which file a path leads to and in what state, as far as the system tells without reading it.
struct FileIdentity {
  uint64_t device = 0, inode = 0;
  int64_t bytes = 0, modified_ns = 0;
  bool operator==(const FileIdentity&) const = default;
};
// Links are followed. None where there is nothing.
std::optional<FileIdentity> identity_of(const std::filesystem::path& path);
std::optional<FileIdentity> identity_of(int descriptor);

// Files that a run reads for as long as it lasts, the weights of a model say: what it makes of them
// holds for what they were, if they were one thing all the time.
class LongInputs {
 public:
  explicit LongInputs(std::vector<std::filesystem::path> paths);
  // Throws Error when a path does not lead any more to what it led to, or that has been written to.
  void require_unchanged() const;

 private:
  std::vector<std::filesystem::path> paths_;
  std::vector<std::optional<FileIdentity>> identities_;
};

// A regular file, open for reading.
class InputFile {
 public:
  // Throws Error for what is missing, may not be read or is no regular file. Waits for nothing: a
  // FIFO is refused.
  explicit InputFile(std::filesystem::path path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  uint64_t bytes() const { return static_cast<uint64_t>(identity_.bytes); }
  const FileIdentity& identity() const { return identity_; }
  // Up to `bytes` from `offset` on, fewer only at the end of the file. Throws Error when the system
  // fails to read.
  size_t read(char* to, size_t bytes, uint64_t offset = 0) const;
  // A name that leads to this descriptor, for libraries that open files by name.
  std::string alias() const;
  // Of the content, in hexadecimal. Throws Error when it cannot be read.
  std::string sha256() const;
  // Throws Error when the file has been written to since it was opened. One that was replaced is
  // still read as it was.
  void require_unchanged() const;
  // Throws Error when its name does not lead to it any more, too.
  void require_in_place() const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  FileIdentity identity_;
};

// Whether `entry`, of the listing of `folder`, is a link that leads out of it. A snapshot in a
// cache of the Hugging Face hub keeps its files beside it, in "blobs": these belong to it.
bool leads_outside(const std::filesystem::path& folder, const std::filesystem::path& entry);

}  // namespace oscar
