// Bundles and checkpoints to disk, whole or not at all.
#include "oscar/base/atomic_file.h"
#include "oscar/base/error.h"
#include "oscar/bundle/bundle.h"
#include "oscar/bundle/checkpoint.h"
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

void write_checkpoint(const std::filesystem::path& path, const Bundle& bundle,
                      const ResumeState& state) {
  AtomicFile file(path);
  write_encoded(encode_bundle(bundle, &state), file.temporary());
  file.commit();
}

RunCheckpoint read_checkpoint(const std::filesystem::path& path) {
  RawFile raw = load_raw(path);
  const FileKind kind = check_format(raw);
  if (kind != FileKind::kCheckpoint) {
    throw Error({.what = "this file is no checkpoint",
                 .where = path.string(),
                 .expected = "a statistics file with a /resume group"});
  }
  check_content_hash(raw);
  RunCheckpoint checkpoint;
  checkpoint.bundle = decode_bundle(raw, kind);
  checkpoint.state = decode_resume(raw);
  return checkpoint;
}

}  // namespace oscar
