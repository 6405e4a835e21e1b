// Saving and restoring a run. Sums are saved to the bit, so resuming changes nothing.
#include "oscar/calibrate/resume.h"

#include <fmt/format.h>

#include <cstring>

#include "oscar/base/error.h"
#include "oscar/bundle/checkpoint.h"

namespace oscar {
namespace {

constexpr const char* kOrder = "layer-major";

const char* dtype_text(torch::Dtype dtype) { return dtype == torch::kBFloat16 ? "bf16" : "fp32"; }

ResumeTensor to_saved(const torch::Tensor& hidden, size_t index) {
  const torch::Tensor host = hidden.to(torch::kCPU).contiguous();
  const auto* bytes = static_cast<const uint8_t*>(host.data_ptr());
  return {.name = fmt::format("hidden_{:06d}", index),
          .dtype = dtype_text(host.scalar_type()),
          .shape = host.sizes().vec(),
          .bytes = {bytes, bytes + host.nbytes()}};
}

torch::Tensor from_saved(const ResumeTensor& saved) {
  torch::Tensor hidden =
      torch::empty(saved.shape, saved.dtype == "bf16" ? torch::kBFloat16 : torch::kFloat32);
  if (hidden.nbytes() != saved.bytes.size()) {
    throw Error({.what = "damaged checkpoint", .where = saved.name});
  }
  std::memcpy(hidden.data_ptr(), saved.bytes.data(), saved.bytes.size());
  return hidden;
}

}  // namespace

CheckpointFile::CheckpointFile(const CalibrateOptions& options, const Bundle& run)
    : path_(options.output), run_(run) {
  path_ += ".checkpoint";
}

bool CheckpointFile::due(const RunPosition& next, const RunPlan& plan, bool stop_requested) const {
  if (stop_requested) return true;
  const bool shard_end = next.layer == 0;
  if (shard_end && next.shard == plan.shards.size()) return false;
  if (!shard_end && plan.weights_resident) return false;
  constexpr int kShareOfTime = 20;
  return Clock::now() - last_save_ >= kShareOfTime * last_cost_;
}

void CheckpointFile::save(std::vector<LayerStatistics> statistics, const RunPosition& next) {
  const auto start = Clock::now();
  Bundle bundle = run_;
  bundle.statistics_only = true;
  bundle.statistics = std::move(statistics);
  ResumeState state{.run_key = run_.run_key,
                    .order = kOrder,
                    .shard = static_cast<int64_t>(next.shard),
                    .layer = next.layer,
                    .tensors = {}};
  for (size_t i = 0; i < next.hidden.size(); ++i) {
    state.tensors.push_back(to_saved(next.hidden[i], i));
  }
  write_checkpoint(path_, bundle, state);
  last_save_ = Clock::now();
  last_cost_ = last_save_ - start;
}

std::optional<SavedRun> CheckpointFile::load() {
  if (!std::filesystem::exists(path_)) return std::nullopt;
  RunCheckpoint saved = read_checkpoint(path_);
  if (saved.state.run_key != run_.run_key || saved.state.order != kOrder) {
    throw Error({.what = "the checkpoint belongs to another run",
                 .where = path_.string(),
                 .expected = "the same weights, corpus, options and kind of device",
                 .found = fmt::format("a run of {} over {} tokens", saved.bundle.model.name,
                                      saved.bundle.corpus.tokens),
                 .hint = "delete it, or repeat the command that it belongs to"});
  }
  SavedRun run;
  run.statistics = std::move(saved.bundle.statistics);
  run.position.shard = static_cast<size_t>(saved.state.shard);
  run.position.layer = saved.state.layer;
  for (const ResumeTensor& tensor : saved.state.tensors) {
    run.position.hidden.push_back(from_saved(tensor));
  }
  return run;
}

void CheckpointFile::remove() {
  std::error_code ignored;  // there may be none
  std::filesystem::remove(path_, ignored);
}

bool is_finished_output(const CalibrateOptions& options, const Bundle& run) {
  if (!std::filesystem::exists(options.output)) return false;
  return read_bundle(options.output).run_key == run.run_key;
}

}  // namespace oscar
