// Read-only memory maps of whole files.
#pragma once

#include <cstddef>
#include <filesystem>

namespace oscar {

// A read-only memory map. Throws Error when the file is missing or empty.
class MappedFile {
 public:
  explicit MappedFile(std::filesystem::path path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  const std::filesystem::path& path() const { return path_; }
  // Tells the kernel that these bytes are not needed again soon (weights already used).
  void release(const std::byte* begin, size_t bytes) const;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace oscar
