// Bundles to disk, whole or not at all.
#include "oscar/base/interrupt.h"
#include "oscar/bundle/bundle_file.h"
#include "oscar/bundle/raw_file.h"

namespace oscar {

void write_bundle(const Bundle& bundle, AtomicFile& file) {
  const auto stop = [] { stop_if_requested("stopped; nothing was written"); };
  write_encoded(encode_bundle(bundle, nullptr), file, stop);
  stop();
  file.commit();
}

void write_bundle(const Bundle& bundle, const std::filesystem::path& path, bool force) {
  AtomicFile file(path, force ? Replace::kYes : Replace::kNo);
  write_bundle(bundle, file);
}

}  // namespace oscar
