// Checkpoints to disk and back.
#include "oscar/bundle/run_checkpoint.h"

#include <fmt/format.h>

#include "oscar/base/files.h"
#include "oscar/bundle/raw_file.h"

namespace oscar {

void ResumeTensor::own(std::vector<uint8_t> values) {
  auto kept = std::make_shared<const std::vector<uint8_t>>(std::move(values));
  bytes = *kept;
  owner = std::move(kept);
}

void write_checkpoint(const std::filesystem::path& path, const Bundle& bundle,
                      const ResumeState& state) {
  AtomicFile file(path);
  write_encoded(encode_bundle(bundle, &state), file);
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

std::optional<RunCheckpoint> read_own_checkpoint(const std::filesystem::path& path,
                                                 const CheckpointOwner& owner) {
  if (!std::filesystem::exists(path)) return std::nullopt;
  RunCheckpoint saved = read_with_hint(
      [&] { return read_checkpoint(path); },
      "a run keeps its checkpoint under this name: delete the file, or move it away, and start "
      "anew");
  if (saved.state.order != owner.order) {
    throw Error({.what = "the checkpoint was taken by another version of this program",
                 .where = path.string(),
                 .expected = fmt::format("a position in the order '{}'", owner.order),
                 .found = fmt::format("'{}'", saved.state.order),
                 .hint = "delete it and start anew, or resume with the version that took it"});
  }
  if (saved.state.run_key != owner.run_key) {
    throw Error({.what = "the checkpoint belongs to another run",
                 .where = path.string(),
                 .expected = owner.shared,
                 .found = fmt::format("a run of {} over {} tokens", saved.bundle.model.name,
                                      saved.bundle.corpus.tokens),
                 .hint = "delete it, or repeat the command that it belongs to"});
  }
  return saved;
}

void refuse_to_replace_checkpoint(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return;
  throw Error({.what = "a run that was stopped has left its checkpoint here",
               .where = path.string(),
               .hint = "--resume continues that run, --force begins anew and discards it"});
}

void remove_checkpoint(const std::filesystem::path& path) {
  std::error_code ignored;
  std::filesystem::remove(path, ignored);
}

bool SavePace::due() const {
  constexpr int kShareOfTime = 20;
  return Clock::now() - last_ >= kShareOfTime * cost_;
}

void SavePace::saved(Clock::time_point start) {
  last_ = Clock::now();
  cost_ = last_ - start;
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
