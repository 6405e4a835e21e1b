// Files and folders that appear whole or not at all, and inputs that are read within bounds.
#include "oscar/base/files.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <list>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/base/process.h"
#include "oscar/base/sha256.h"

namespace oscar {

// Names that cannot be foreseen, locks that end with their process, renames that refuse to replace.

namespace {

namespace fs = std::filesystem;

constexpr size_t kRandomBytes = 8;
constexpr const char* kSuffix = ".tmp";
// Two runs that begin at once see each other and begin again after waits of random length, each
// twice as long as the one before: 8 of them take a second or so in all.
constexpr int kAttempts = 8;
constexpr int kFirstWaitMs = 8;

std::array<unsigned char, kRandomBytes> random_bytes() {
  std::array<unsigned char, kRandomBytes> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw Error({.what = "the system gives no random numbers", .found = std::strerror(errno)});
  }
  return bytes;
}

std::string random_name(const fs::path& target) {
  std::string name = target.filename().string() + '.';
  for (const unsigned char byte : random_bytes()) {
    for (const int digit : {byte >> 4, byte & 15}) name += "0123456789abcdef"[digit];
  }
  return name + kSuffix;
}

bool is_temporary_of(const std::string& name, const fs::path& target) {
  const std::string stem = target.filename().string() + '.';
  if (name.size() != stem.size() + 2 * kRandomBytes + std::strlen(kSuffix)) return false;
  return name.starts_with(stem) && name.ends_with(kSuffix) &&
         name.find_first_not_of("0123456789abcdef", stem.size()) ==
             name.size() - std::strlen(kSuffix);
}

enum class Lock { kTaken, kHeldByOthers, kUnknown };

Lock try_lock(int descriptor) {
  if (::flock(descriptor, LOCK_EX | LOCK_NB) == 0) return Lock::kTaken;
  return errno == EWOULDBLOCK ? Lock::kHeldByOthers : Lock::kUnknown;
}

int opening_flags(Temporary::Kind kind) {
  const int common = O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
  return kind == Temporary::Kind::kFile ? common | O_RDWR : common | O_RDONLY | O_DIRECTORY;
}

void wait_before(int attempt) {
  const int most = kFirstWaitMs << attempt;
  std::this_thread::sleep_for(std::chrono::milliseconds(most / 2 + random_bytes()[0] % most / 2));
}

// Some file systems cannot flush folders, and say so with EINVAL.
bool flush_folder(int folder) { return ::fsync(folder) == 0 || errno == EINVAL; }

// Of this process. Never freed: it is asked for when static objects are gone.
struct AllUnfinished {
  std::mutex mutex;
  std::list<const Unfinished*> entries;
};
AllUnfinished& all_unfinished() {
  static auto* const all = new AllUnfinished;
  return *all;
}

[[noreturn]] void refuse_missing_folder(const char* what, const fs::path& target) {
  throw Error({.what = what,
               .where = target.string(),
               .found = std::strerror(ENOENT),
               .hint = "make the folder first: " + target.parent_path().string()});
}

[[noreturn]] void refuse_existing(const fs::path& target) {
  throw Error({.what = "output exists already: it was made while this run was under way",
               .where = target.string(),
               .hint = "choose another name"});
}

}  // namespace

void throw_file_error(const char* what, const fs::path& path) {
  const int code = errno;
  const bool full = code == ENOSPC || code == EDQUOT || code == EFBIG;
  const char* hint = full                              ? "free some space or choose another folder"
                     : code == EACCES || code == EROFS ? "choose a folder that you may write to"
                                                       : "";
  throw Error({.what = what, .where = path.string(), .found = std::strerror(code), .hint = hint});
}

Unfinished::Unfinished(fs::path path) : path_(std::move(path)), process_(::getpid()) {
  AllUnfinished& all = all_unfinished();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.entries.push_back(this);
}

Unfinished::~Unfinished() {
  AllUnfinished& all = all_unfinished();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.entries.remove(this);
}

bool remove_unfinished() noexcept {
  AllUnfinished& all = all_unfinished();
  const std::lock_guard<std::mutex> lock(all.mutex);
  bool any = false;
  for (const Unfinished* entry : all.entries) {
    if (entry->process_ != ::getpid()) continue;
    any = true;
    try {
      fs::remove_all(entry->path_);
    } catch (const std::exception&) {  // the next run of the same output removes it
    }
  }
  return any;
}

Temporary::Temporary(const fs::path& target, Kind kind)
    : target_(target.has_parent_path() ? target : "." / target),
      kind_(kind),
      before_(identity_of(target_)) {
  const char* what = kind == Kind::kFile ? "cannot write output file" : "cannot make output folder";
  folder_ = ::open(target_.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder_ < 0 && errno == ENOENT) refuse_missing_folder(what, target);
  if (folder_ < 0) throw_file_error(what, target);
  try {
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      if (attempt > 0) wait_before(attempt);
      name_ = random_name(target_);
      if (!create()) {
        name_.clear();
        throw_file_error(what, target);
      }
      unfinished_.emplace(path());
      const Lock lock = try_lock(descriptor_);
      struct stat status {};
      const bool ours = lock != Lock::kHeldByOthers && ::fstat(descriptor_, &status) == 0 &&
                        status.st_nlink > 0;  // another run may have taken it for a left one
      if (ours && sole_writer()) return;
      remove();
    }
    throw Error({.what = "another run is writing this output",
                 .where = target.string(),
                 .hint = "wait until it is done, or choose another name"});
  } catch (...) {
    remove();
    ::close(folder_);
    throw;
  }
}

Temporary::~Temporary() {
  remove();
  ::close(folder_);
}

bool Temporary::create() {
  if (kind_ == Kind::kFolder) {
    if (::mkdirat(folder_, name_.c_str(), 0777) != 0) return false;
    descriptor_ = ::openat(folder_, name_.c_str(), opening_flags(kind_));
    if (descriptor_ < 0) ::unlinkat(folder_, name_.c_str(), AT_REMOVEDIR);
  } else {
    descriptor_ = ::openat(folder_, name_.c_str(), opening_flags(kind_) | O_CREAT | O_EXCL, 0666);
  }
  return descriptor_ >= 0;
}

// Looks at the temporaries of the same target: those that nobody holds are removed.
bool Temporary::sole_writer() const {
  bool sole = true;
  std::error_code status;
  std::vector<std::string> names;
  for (auto entry = fs::directory_iterator(target_.parent_path(), status);
       !status && entry != fs::directory_iterator(); entry.increment(status)) {
    names.push_back(entry->path().filename().string());
  }
  for (const std::string& name : names) {
    if (name == name_ || !is_temporary_of(name, target_)) continue;
    const int other = ::openat(folder_, name.c_str(), opening_flags(kind_));
    if (other < 0) continue;
    struct stat found {};
    const bool same_kind =
        ::fstat(other, &found) == 0 && (kind_ == Kind::kFolder || S_ISREG(found.st_mode));
    const Lock lock = same_kind ? try_lock(other) : Lock::kUnknown;
    if (lock == Lock::kTaken) fs::remove_all(target_.parent_path() / name, status);
    if (lock == Lock::kHeldByOthers) sole = false;
    ::close(other);
  }
  return sole;
}

void Temporary::remove() {
  if (!name_.empty()) {
    std::error_code status;
    fs::remove_all(path(), status);
    name_.clear();
  }
  unfinished_.reset();
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

void Temporary::publish(Replace replace) {
  const bool folder = kind_ == Kind::kFolder;
  if ((folder ? ::syncfs(descriptor_) : ::fsync(descriptor_)) != 0) {
    throw_file_error("cannot flush to disk", target_);
  }
  take_place(replace);
  name_.clear();
  unfinished_.reset();
  if (!flush_folder(folder_)) throw_file_error("cannot flush to disk", target_.parent_path());
}

void Temporary::take_place(Replace replace) const {
  const std::string to = target_.filename().string();
  const auto rename = [&] {
    if (::renameat(folder_, name_.c_str(), folder_, to.c_str()) != 0) {
      throw_file_error("cannot rename the output", target_);
    }
  };
  if (replace == Replace::kYes) return rename();
  if (replace == Replace::kIfUnchanged) {
    const auto now = identity_of(target_);
    if (now == before_) return rename();
    if (before_) {
      throw Error({.what = "the file was changed or replaced meanwhile, and is left as it is",
                   .where = target_.string()});
    }
    refuse_existing(target_);
  }
  if (::renameat2(folder_, name_.c_str(), folder_, to.c_str(), RENAME_NOREPLACE) == 0) return;
  if (errno == EEXIST) refuse_existing(target_);
  if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) {
    throw_file_error("cannot rename the output", target_);
  }
  // A file system that cannot: a second link is refused where something stands.
  if (kind_ == Kind::kFile) {
    if (::linkat(folder_, name_.c_str(), folder_, to.c_str(), 0) == 0) {
      ::unlinkat(folder_, name_.c_str(), 0);
      return;
    }
    if (errno == EEXIST) refuse_existing(target_);
  }
  struct stat status {};
  if (::fstatat(folder_, to.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) refuse_existing(target_);
  rename();
}

// Where an output goes: a temporary that is renamed, or memory that is copied into a stream.

namespace {

namespace fs = std::filesystem;

constexpr int kMostLinks = 40;  // as many as the system follows
constexpr int kPollMs = 50;     // between looks at a request to stop

// Closes on scope exit, so that no error path leaks a descriptor.
struct OpenStream {
  int value;
  ~OpenStream() {
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
  const OpenStream stream{open_stream(target_)};
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

// A target that does not exist, and its temporary.

AtomicFolder::AtomicFolder(const std::filesystem::path& target)
    : target_(target.lexically_normal()) {
  if (!target_.has_filename()) target_ = target_.parent_path();  // "name/"
  std::error_code status;
  if (std::filesystem::exists(std::filesystem::symlink_status(target_, status))) {
    throw Error({.what = "output folder exists already",
                 .where = target_.string(),
                 .hint = "choose another name, or remove it"});
  }
  folder_.emplace(target_, Temporary::Kind::kFolder);
}

AtomicFolder::~AtomicFolder() = default;

void AtomicFolder::commit() { folder_->publish(Replace::kNo); }

// fstat at the beginning and at the end.

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

namespace {

// What a clone leaves in place of large files where Git LFS is not installed.
bool is_lfs_pointer(const InputFile& file) {
  constexpr std::string_view kBegin = "version https://git-lfs.github.com/spec/";
  constexpr uint64_t kMostBytes = 1024;  // of a pointer, by its specification
  if (file.bytes() < kBegin.size() || file.bytes() >= kMostBytes) return false;
  std::string begin(kBegin.size(), '\0');
  return file.read(begin.data(), begin.size()) == begin.size() && begin == kBegin;
}

}  // namespace

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
  if (is_lfs_pointer(*this)) {
    ::close(descriptor_);
    throw Error({.what = "the file is a pointer of Git LFS, not what it stands for",
                 .where = path_.string(),
                 .hint = "fetch what it stands for: git lfs pull, in its folder"});
  }
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
