// Names that cannot be foreseen, locks that end with their process, renames that refuse to replace.
#include "oscar/base/temporary.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
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
#include <vector>

#include "oscar/base/error.h"

namespace oscar {
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

}  // namespace oscar
