// Checkpoints of a calibration run: a statistics file plus what is needed to continue.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "oscar/bundle/bundle.h"

namespace oscar {

// A tensor of the run as plain bytes, for example the hidden states of one chunk.
struct ResumeTensor {
  std::string name;   // [A-Za-z0-9_.-]+, unique
  std::string dtype;  // in the writer's words, for example "bf16"
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;  // at least one
};

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

// Throws Error for content that no run has written; `where` names the file and the place in it.
[[noreturn]] void refuse_damaged_checkpoint(const std::string& where, const std::string& expected,
                                            const std::string& found);

}  // namespace oscar
