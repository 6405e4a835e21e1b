// Checkpoints to disk and back.
#include "oscar/bundle/run_checkpoint.h"

#include "oscar/base/atomic_file.h"
#include "oscar/base/error.h"
#include "oscar/bundle/raw_file.h"

namespace oscar {

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

void refuse_damaged_checkpoint(const std::string& where, const std::string& expected,
                               const std::string& found) {
  throw Error({.what = "damaged checkpoint",
               .where = where,
               .expected = expected,
               .found = found,
               .hint = "delete it and start anew"});
}

}  // namespace oscar
