// Read-only memory maps. The one owner of mmap.
#include "oscar/io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "oscar/base/error.h"

namespace oscar {

MappedFile::MappedFile(std::filesystem::path path) : path_(std::move(path)) {
  const int descriptor = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    throw Error(
        {.what = "cannot open file", .where = path_.string(), .found = std::strerror(errno)});
  }
  struct stat status {};
  const bool regular = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  if (!regular || status.st_size == 0) {
    ::close(descriptor);
    throw Error({.what = regular ? "file is empty" : "not a regular file",
                 .where = path_.string(),
                 .hint = "the download may be incomplete"});
  }
  size_ = static_cast<size_t>(status.st_size);
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
  const int reason = errno;
  ::close(descriptor);  // the map keeps the file alive
  if (mapped == MAP_FAILED) {
    throw Error(
        {.what = "cannot map file", .where = path_.string(), .found = std::strerror(reason)});
  }
  data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::release(const std::byte* begin, size_t bytes) const {
  // Only whole pages inside the range: neighbours may still be in use.
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t first = (static_cast<size_t>(begin - data_) + page - 1) / page * page;
  const size_t last =
      static_cast<size_t>(begin - data_ + static_cast<ptrdiff_t>(bytes)) / page * page;
  if (last > first) {
    // Advice only: a failure costs memory, never correctness.
    (void)::madvise(const_cast<std::byte*>(data_) + first, last - first, MADV_DONTNEED);
  }
}

}  // namespace oscar
