// Read-only memory maps of whole files.
#pragma once

#include <cstddef>
#include <filesystem>

#include "oscar/base/input_file.h"

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
  const std::filesystem::path& path() const { return file_.path(); }
  // Copies bytes of the map by reading the file: for much that is needed once, faster than through
  // pages, above all from a disk. Throws Error when the file has become shorter.
  void read(const std::byte* begin, size_t bytes, std::byte* out) const;
  // Has the system read these bytes into its cache meanwhile, if it likes.
  void read_ahead(const std::byte* begin, size_t bytes) const;
  // Tells the kernel that these bytes are not needed again soon (weights already used).
  void release(const std::byte* begin, size_t bytes) const;

 private:
  InputFile file_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace oscar
