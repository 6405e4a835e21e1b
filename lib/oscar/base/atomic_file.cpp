// Where an output goes: a temporary that is renamed, or memory that is copied into a stream.
#include "oscar/base/atomic_file.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "oscar/base/error.h"
#include "oscar/base/interrupt.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;

constexpr int kMostLinks = 40;  // as many as the system follows
constexpr int kPollMs = 50;     // between looks at a request to stop

// Closes on scope exit, so that no error path leaks a descriptor.
struct Descriptor {
  int value;
  ~Descriptor() {
    if (value >= 0) ::close(value);
  }
};

// Which of this program's own streams `status` is of; -1: none.
int own_stream(const struct stat& status) {
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat own {};
    if (::fstat(stream, &own) == 0 && own.st_dev == status.st_dev && own.st_ino == status.st_ino) {
      return stream;
    }
  }
  return -1;
}

// One of this program's own is written through its descriptor, whoever owns what is behind it.
bool may_write_stream(const fs::path& target) {
  struct stat status {};
  const bool own = ::stat(target.c_str(), &status) == 0 && own_stream(status) >= 0;
  return own || ::access(target.c_str(), W_OK) == 0;
}

int open_stream(const fs::path& target) {
  struct stat status {};
  if (::stat(target.c_str(), &status) == 0) {
    const int own = own_stream(status);
    if (own == STDOUT_FILENO) (void)std::fflush(stdout);
    if (own >= 0) return ::fcntl(own, F_DUPFD_CLOEXEC, 0);
  }
  for (;;) {
    const int stream = ::open(target.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (stream >= 0 || errno != ENXIO) return stream;
    stop_if_requested();  // a FIFO without a reader
    ::poll(nullptr, 0, kPollMs);
  }
}

void write_all(int descriptor, std::string_view bytes, const fs::path& target) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written > 0) bytes.remove_prefix(static_cast<size_t>(written));
    if (written >= 0 || errno == EINTR) continue;
    if (errno != EAGAIN) throw_file_error("cannot write output file", target);
    stop_if_requested();
    pollfd ready{.fd = descriptor, .events = POLLOUT, .revents = 0};
    ::poll(&ready, 1, kPollMs);
  }
}

}  // namespace

fs::path follow_links(fs::path path) {
  std::error_code status;
  for (int links = 0; fs::is_symlink(fs::symlink_status(path, status)); ++links) {
    if (links == kMostLinks) {
      errno = ELOOP;
      throw_file_error("cannot write output file", path);
    }
    path = path.parent_path() / fs::read_symlink(path, status);
    if (status) throw Error({.what = "cannot follow a link", .where = path.string()});
  }
  return path;
}

bool leads_to_stream(const fs::path& target) {
  struct stat status {};
  if (::stat(target.c_str(), &status) != 0) return false;
  if (S_ISDIR(status.st_mode)) {
    throw Error({.what = "output path is a folder", .where = target.string()});
  }
  if (own_stream(status) >= 0 || S_ISFIFO(status.st_mode) || S_ISCHR(status.st_mode)) return true;
  if (S_ISREG(status.st_mode)) return false;
  throw Error({.what = "cannot write output file",
               .where = target.string(),
               .expected = "a file, a FIFO or a terminal",
               .found = S_ISBLK(status.st_mode) ? "a block device" : "a socket"});
}

AtomicFile::AtomicFile(const fs::path& target, Replace replace)
    : target_(target), replace_(replace) {
  if (target.empty()) throw Error({.what = "an output file has an empty name"});
  if (leads_to_stream(target)) {
    if (!may_write_stream(target)) throw_file_error("cannot write output file", target);
    memory_ = ::memfd_create("output", MFD_CLOEXEC);
    if (memory_ < 0) throw_file_error("cannot write output file", target);
    return;
  }
  const fs::path place = follow_links(target);
  file_.emplace(place, Temporary::Kind::kFile);
  // Only now: another run may have ended while this one waited for it.
  std::error_code status;
  if (replace == Replace::kNo && fs::exists(place, status)) {
    throw Error({.what = "output file exists already",
                 .where = target.string(),
                 .hint = "choose another name, or replace it with --force"});
  }
}

AtomicFile::~AtomicFile() {
  if (memory_ >= 0) ::close(memory_);
}

int AtomicFile::descriptor() const { return file_ ? file_->descriptor() : memory_; }

void AtomicFile::append(std::string_view bytes) { write_all(descriptor(), bytes, target_); }

void AtomicFile::begin_to_flush() const {
  ::sync_file_range(descriptor(), 0, 0, SYNC_FILE_RANGE_WRITE);  // commit() meets its errors
}

void AtomicFile::commit() {
  if (file_) return file_->publish(replace_);
  const Descriptor stream{open_stream(target_)};
  if (stream.value < 0) throw_file_error("cannot write output file", target_);
  std::array<char, 1 << 16> block;
  for (off_t done = 0;;) {
    const ssize_t count = ::pread(memory_, block.data(), block.size(), done);
    if (count < 0) throw_file_error("cannot write output file", target_);
    if (count == 0) return;
    write_all(stream.value, {block.data(), static_cast<size_t>(count)}, target_);
    done += count;
  }
}

void write_file_atomically(const fs::path& target, std::string_view content, Replace replace) {
  AtomicFile file(target, replace);
  file.append(content);
  file.commit();
}

}  // namespace oscar
