// Temporary name, fsync, rename: the order that survives a crash at any moment.
#include "oscar/base/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "oscar/base/error.h"

namespace oscar {
namespace {

// Closes on scope exit, so that no error path leaks a descriptor.
struct Descriptor {
  int value;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

void flush_to_disk(const std::filesystem::path& path, int flags) {
  const Descriptor file{::open(path.c_str(), flags)};
  if (file.value < 0) throw_file_error("cannot open for flushing", path);
  if (::fsync(file.value) != 0) throw_file_error("cannot flush to disk", path);
}

}  // namespace

void throw_file_error(const char* what, const std::filesystem::path& path) {
  const int code = errno;
  const char* hint = code == ENOSPC                    ? "free some space or choose another folder"
                     : code == EACCES || code == EROFS ? "choose a folder that you may write to"
                                                       : "";
  throw Error({.what = what, .where = path.string(), .found = std::strerror(code), .hint = hint});
}

void flush_parent_folder(const std::filesystem::path& path) {
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  flush_to_disk(folder, O_RDONLY | O_DIRECTORY);
}

AtomicFile::AtomicFile(std::filesystem::path target) : target_(std::move(target)) {
  if (target_.empty()) throw Error({.what = "an output file has an empty name"});
  std::error_code status;
  if (std::filesystem::is_directory(target_, status)) {
    throw Error({.what = "output path is a folder", .where = target_.string()});
  }
  temporary_ = target_;
  temporary_ += "." + std::to_string(::getpid()) + ".tmp";
  const Descriptor file{::open(temporary_.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0666)};
  if (file.value < 0) throw_file_error("cannot write output file", target_);
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::commit() {
  flush_to_disk(temporary_, O_RDONLY);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0)
    throw_file_error("cannot rename output file", target_);
  temporary_.clear();
  flush_parent_folder(target_);
}

void write_file_atomically(const std::filesystem::path& target, std::string_view content) {
  AtomicFile file(target);
  {
    const Descriptor stream{::open(file.temporary().c_str(), O_WRONLY)};
    if (stream.value < 0) throw_file_error("cannot write output file", target);
    for (size_t done = 0; done < content.size();) {
      const ssize_t written = ::write(stream.value, content.data() + done, content.size() - done);
      if (written < 0) throw_file_error("cannot write output file", target);
      done += static_cast<size_t>(written);
    }
  }
  file.commit();
}

}  // namespace oscar
