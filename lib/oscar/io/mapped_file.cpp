// Read-only memory maps. The one owner of mmap.
#include "oscar/io/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/io/cut_files.h"

namespace oscar {

MappedFile::MappedFile(std::filesystem::path path) : file_(std::move(path)) {
  if (file_.bytes() == 0) {
    throw Error({.what = "file is empty",
                 .where = file_.path().string(),
                 .hint = "the download may be incomplete"});
  }
  size_ = file_.bytes();
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file_.descriptor(), 0);
  if (mapped == MAP_FAILED) {
    throw Error(
        {.what = "cannot map file", .where = file_.path().string(), .found = std::strerror(errno)});
  }
  data_ = static_cast<const std::byte*>(mapped);
  name_map(data_, size_, file_.path().c_str());
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  forget_map(data_);
  ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::read(const std::byte* begin, size_t bytes, std::byte* out) const {
  const auto offset = static_cast<uint64_t>(begin - data_);
  if (file_.read(reinterpret_cast<char*>(out), bytes, offset) == bytes) return;
  throw Error({.what = "a file was cut short while it was in use", .where = path().string()});
}

void MappedFile::read_ahead(const std::byte* begin, size_t bytes) const {
  // Of more at once the kernel leaves out the rest: what a device takes at a time bounds it.
  constexpr size_t kAtOnce = size_t{1} << 20;
  const auto offset = static_cast<off_t>(begin - data_);
  for (size_t done = 0; done < bytes; done += kAtOnce) {
    // Advice only: a failure costs time, never correctness.
    (void)::posix_fadvise(file_.descriptor(), offset + static_cast<off_t>(done),
                          static_cast<off_t>(std::min(kAtOnce, bytes - done)), POSIX_FADV_WILLNEED);
  }
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
