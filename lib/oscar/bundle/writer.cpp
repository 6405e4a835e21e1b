// Bundles to disk, whole or not at all.
#include "oscar/base/atomic_file.h"
#include "oscar/base/error.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/raw_file.h"

namespace oscar {

void write_bundle(const Bundle& bundle, const std::filesystem::path& path, bool force) {
  std::error_code code;
  if (!force && std::filesystem::exists(std::filesystem::symlink_status(path, code))) {
    throw Error({.what = "output file exists",
                 .where = path.string(),
                 .hint = "choose another name, or pass --force to replace it"});
  }
  AtomicFile file(path);
  write_encoded(encode_bundle(bundle, nullptr), file.temporary());
  file.commit();
}

}  // namespace oscar
