// Checkpoints of a calibration run: a statistics file plus what is needed to continue.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/bundle/bundle.h"

namespace oscar {

// A tensor of the run as plain bytes, for example the hidden states of one batch. Copies share the
// bytes: hidden states may take most of the memory that a run has.
struct ResumeTensor {
  std::string name;   // [A-Za-z0-9_.-]+, unique
  std::string dtype;  // in the writer's words, for example "bf16"
  std::vector<int64_t> shape;
  std::span<const uint8_t> bytes = {};     // at least one
  std::shared_ptr<const void> owner = {};  // of `bytes`

  void own(std::vector<uint8_t> values);
};

// Where a run towards `output` keeps its checkpoint.
inline std::filesystem::path checkpoint_path(std::filesystem::path output) {
  output += ".checkpoint";
  return output;
}

// Where a run stands. What the numbers count is the run's own business; `order` names its rule.
struct ResumeState {
  std::string run_key;  // hash of everything that decides the result; other runs must not resume
  std::string order;    // for example "layer-major"
  int64_t shard = 0;    // where in the corpus, as `order` counts
  int layer = 0;
  std::vector<ResumeTensor> tensors = {};
};

struct RunCheckpoint {
  Bundle bundle;  // statistics_only; statistics of layers not reached yet may be absent
  ResumeState state;
};

// Writes atomically and replaces a previous checkpoint at `path`.
void write_checkpoint(const std::filesystem::path& path, const Bundle& bundle,
                      const ResumeState& state);

// Throws Error when the file is missing, damaged, or no checkpoint. Comparing run_key is the
// caller's part.
RunCheckpoint read_checkpoint(const std::filesystem::path& path);

// Which checkpoints a run continues from.
struct CheckpointOwner {
  std::string run_key, order;  // as in ResumeState
  std::string shared;          // what two runs of one key have in common, in words
};

// The checkpoint of `owner` at `path`; nullopt when there is none. Throws Error, with a way out,
// for a file that is damaged, another run's, or of another version's order.
std::optional<RunCheckpoint> read_own_checkpoint(const std::filesystem::path& path,
                                                 const CheckpointOwner& owner);

// Throws Error where a run that was stopped has left its checkpoint: a new one would replace it.
void refuse_to_replace_checkpoint(const std::filesystem::path& path);

// Removes a checkpoint that nobody needs any more. There may be none.
void remove_checkpoint(const std::filesystem::path& path);

// Whether saving again would take no more than a twentieth of the run's time.
class SavePace {
 public:
  using Clock = std::chrono::steady_clock;
  // Until something was saved: what `expected_bytes` would take at 1 GB/s.
  explicit SavePace(int64_t expected_bytes = 0) : cost_(std::chrono::nanoseconds(expected_bytes)) {}
  bool due() const;
  void saved(Clock::time_point start);  // saving began then and has just ended

 private:
  Clock::time_point last_ = Clock::now();
  Clock::duration cost_;
};

// `read()`; an Error without a hint gets this one.
template <typename Read>
auto read_with_hint(const Read& read, const char* hint) {
  try {
    return read();
  } catch (const Error& error) {
    ErrorInfo info = error.info();
    if (info.hint.empty()) info.hint = hint;
    throw Error(std::move(info));
  }
}

// Throws Error for content that no run has written; `where` names the file and the place in it.
[[noreturn]] void refuse_damaged_checkpoint(const std::string& where, const std::string& expected,
                                            const std::string& found);

}  // namespace oscar
