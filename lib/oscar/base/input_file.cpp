// fstat at the beginning and at the end.
#include "oscar/base/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "oscar/base/error.h"
#include "oscar/base/sha256.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

FileIdentity identity_from(const struct stat& status) {
  return {.device = status.st_dev,
          .inode = status.st_ino,
          .bytes = status.st_size,
          .modified_ns = int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec};
}

[[noreturn]] void refuse_changed(const fs::path& path, const std::string& found) {
  throw Error({.what = "a file changed while it was in use",
               .where = path.string(),
               .expected = "what was there when the run began",
               .found = found,
               .hint = "run again when nothing writes to it"});
}

// The file of this identity still has its name and its content.
void require_in_place(const fs::path& path, const std::optional<FileIdentity>& before) {
  const auto now = identity_of(path);
  if (now && now == before) return;
  const bool same = now && before && now->inode == before->inode && now->device == before->device;
  refuse_changed(path, !now   ? "no such file"
                       : same ? "new content"
                              : "another file under its name");
}

}  // namespace

std::optional<FileIdentity> identity_of(const fs::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return std::nullopt;
  return identity_from(status);
}

std::optional<FileIdentity> identity_of(int descriptor) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) return std::nullopt;
  return identity_from(status);
}

LongInputs::LongInputs(std::vector<fs::path> paths) : paths_(std::move(paths)) {
  for (const fs::path& path : paths_) identities_.push_back(identity_of(path));
}

void LongInputs::require_unchanged() const {
  for (size_t i = 0; i < paths_.size(); ++i) require_in_place(paths_[i], identities_[i]);
}

InputFile::InputFile(fs::path path) : path_(std::move(path)) {
  // O_NONBLOCK: to open a FIFO would wait for a writer. It changes nothing for regular files.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat status {};
  if (descriptor_ < 0 || ::fstat(descriptor_, &status) != 0) {
    const int reason = errno;
    if (descriptor_ >= 0) ::close(descriptor_);
    throw Error(
        {.what = "cannot read file", .where = path_.string(), .found = std::strerror(reason)});
  }
  if (!S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    const bool folder = S_ISDIR(status.st_mode), fifo = S_ISFIFO(status.st_mode);
    throw Error({.what = "not a regular file",
                 .where = path_.string(),
                 .found = folder ? "a folder" : (fifo ? "a FIFO" : "a device or a socket"),
                 .hint = folder ? "" : "copy what it gives into a file"});
  }
  identity_ = identity_from(status);
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      identity_(other.identity_) {}

std::string InputFile::alias() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

size_t InputFile::read(char* to, size_t bytes, uint64_t offset) const {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t count =
        ::pread(descriptor_, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      throw Error(
          {.what = "cannot read file", .where = path_.string(), .found = std::strerror(errno)});
    }
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  return done;
}

std::string InputFile::sha256() const {
  Sha256 digest;
  std::vector<char> block(size_t{1} << 20);
  uint64_t done = 0;
  while (const size_t count = read(block.data(), block.size(), done)) {
    digest.update(block.data(), count);
    done += count;
  }
  return digest.finish();
}

void InputFile::require_unchanged() const {
  if (identity_of(descriptor_) != identity_) refuse_changed(path_, "new content");
}

void InputFile::require_in_place() const { oscar::require_in_place(path_, identity_); }

bool leads_outside(const fs::path& folder, const fs::path& entry) {
  std::error_code status;
  if (!fs::is_symlink(fs::symlink_status(entry, status))) return false;
  const fs::path here = fs::canonical(folder, status);
  if (status) return true;
  const fs::path there = fs::canonical(entry, status);
  if (status) return true;
  if (here.parent_path().filename() == "snapshots" &&
      there.parent_path() == here.parent_path().parent_path() / "blobs") {
    return false;
  }
  const fs::path inside = there.lexically_relative(here);
  return inside.empty() || *inside.begin() == "..";
}

}  // namespace oscar
