// Temporary folder, flush, rename.
#include "oscar/base/atomic_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include "oscar/base/atomic_file.h"
#include "oscar/base/error.h"

namespace oscar {

AtomicFolder::AtomicFolder(const std::filesystem::path& target)
    : target_(target.lexically_normal()) {
  if (!target_.has_filename()) target_ = target_.parent_path();  // "name/"
  std::error_code status;
  if (std::filesystem::exists(std::filesystem::symlink_status(target_, status))) {
    throw Error({.what = "output folder exists already",
                 .where = target_.string(),
                 .hint = "choose another name, or remove it"});
  }
  temporary_ = target_;
  temporary_ += "." + std::to_string(::getpid()) + ".tmp";
  if (!std::filesystem::create_directory(temporary_, status)) {
    const std::string reason = status ? status.message() : "it exists already";
    throw Error({.what = "cannot make the output folder",
                 .where = target_.string(),
                 .found = reason,
                 .hint = "the folder around it must exist and be writable"});
  }
}

AtomicFolder::~AtomicFolder() {
  std::error_code status;
  if (!temporary_.empty()) std::filesystem::remove_all(temporary_, status);
}

void AtomicFolder::commit() {
  const int folder = ::open(temporary_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) throw_file_error("cannot open for flushing", temporary_);
  const bool flushed = ::syncfs(folder) == 0;
  ::close(folder);
  if (!flushed) throw_file_error("cannot flush to disk", temporary_);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) {
    throw_file_error("cannot rename the output folder", target_);
  }
  temporary_.clear();
  flush_parent_folder(target_);
}

}  // namespace oscar
