// Where weights are read from: files mapped into memory, tensors by name.
#include "oscar/io/weight_source.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/cache/numeric.h"
#include "oscar/io/gguf.h"

namespace oscar {

// Read-only memory maps. The one owner of mmap.

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

// What all weight sources share: element types and the fingerprint of a tensor.

namespace {

constexpr size_t kFingerprintBytes = 4096;  // at each end of a tensor
constexpr size_t kBlockBytes = size_t{1} << 20;

}  // namespace

size_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return "BF16";
    case Dtype::kFp16:
      return "F16";
    case Dtype::kFp32:
      return "F32";
  }
  return "";
}

float stored_float(Dtype dtype, const std::byte* place) {
  if (dtype == Dtype::kFp32) {
    float value;
    std::memcpy(&value, place, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, place, sizeof bits);
  return dtype == Dtype::kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

void add_to_fingerprint(Sha256& digest, const std::string& name, const std::string& dtype,
                        const std::vector<int64_t>& shape, const StoredBytes& stored,
                        bool all_bytes) {
  // A newline cannot be confused with a part of a shape or a dtype, and names come first.
  digest.update(fmt::format("{} {}\n{}\n{}\n", name.size(), name, dtype, shape));
  // Not through the map, where a page brings megabytes along.
  std::vector<std::byte> block;
  const auto add = [&](size_t first, size_t end) {
    for (; first < end; first += block.size()) {
      block.resize(std::min(kBlockBytes, end - first));
      stored.read(first, block.size(), block.data());
      digest.update(block.data(), block.size());
    }
  };
  if (all_bytes || stored.bytes <= 2 * kFingerprintBytes) {
    add(0, stored.bytes);
  } else {
    add(0, kFingerprintBytes);
    add(stored.bytes - kFingerprintBytes, stored.bytes);
  }
}

}  // namespace oscar
