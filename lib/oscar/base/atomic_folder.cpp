// A target that does not exist, and its temporary.
#include "oscar/base/atomic_folder.h"

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
  folder_.emplace(target_, Temporary::Kind::kFolder);
}

AtomicFolder::~AtomicFolder() = default;

void AtomicFolder::commit() { folder_->publish(Replace::kNo); }

}  // namespace oscar
