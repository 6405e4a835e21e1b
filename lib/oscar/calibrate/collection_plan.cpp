// How a calibration's passes run: blocks and copies of sums, and what memory all of it needs.
#include "oscar/calibrate/collection_plan.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

#include "oscar/attention/received_attention.h"
#include "oscar/bundle/raw_file.h"
#include "oscar/calibrate/collector.h"
#include "oscar/calibrate/search/pass.h"

namespace oscar {

// Blocks and copies, at ends of batches.

namespace {

constexpr int64_t kMostBlocks = 8;

// Tokens up to the ends of batches, but that of the last, nearest to so many parts of kMostBlocks.
std::vector<int64_t> ends_nearest(const std::vector<Batch>& batches,
                                  const std::vector<int64_t>& parts) {
  std::vector<int64_t> ends;
  for (const Batch& batch : batches) {
    ends.push_back((ends.empty() ? 0 : ends.back()) + batch.tokens());
  }
  std::vector<int64_t> marks;
  if (ends.size() < 2) return marks;
  const int64_t total = ends.back();
  ends.pop_back();
  for (const int64_t part : parts) {
    const int64_t wanted = total * part / kMostBlocks;
    const int64_t mark = *std::min_element(ends.begin(), ends.end(), [&](int64_t a, int64_t b) {
      return std::abs(a - wanted) < std::abs(b - wanted);
    });
    if (marks.empty() || marks.back() != mark) marks.push_back(mark);
  }
  return marks;
}

}  // namespace

std::vector<int64_t> plan_blocks(const std::vector<Batch>& batches) {
  if (batches.empty()) return {};
  std::vector<int64_t> eighths(kMostBlocks - 1);
  std::iota(eighths.begin(), eighths.end(), 1);
  std::vector<int64_t> blocks = ends_nearest(batches, eighths);
  blocks.push_back(std::transform_reduce(batches.begin(), batches.end(), int64_t{0}, std::plus<>(),
                                         [](const Batch& batch) { return batch.tokens(); }));
  return blocks;
}

int64_t block_start(const CollectionPlan& plan, int64_t tokens) {
  const auto after = std::upper_bound(plan.block_tokens.begin(), plan.block_tokens.end(), tokens);
  return after == plan.block_tokens.begin() ? 0 : *std::prev(after);
}

std::vector<int64_t> plan_snapshots(const std::vector<Batch>& batches) {
  return ends_nearest(batches, {kMostBlocks / 4, kMostBlocks / 2});
}

// What sums and checkpoints need.

namespace {

// One fp64 matrix of every KV head of a layer, and of all layers with statistics.
int64_t layer_matrix_bytes(const ModelConfig& config) {
  return int64_t{config.num_kv_heads} * config.head_dim * config.head_dim * 8;
}

int64_t matrix_bytes(const ModelConfig& config) {
  return config.num_fitted_layers() * layer_matrix_bytes(config);
}

// Running sums of all layers: q, k, v and the attention output, q, k and v once more where they
// are weighted by attention, and gates of the query heads.
int64_t sums_bytes(const ModelConfig& config, bool attended) {
  return (attended ? 7 : 4) * matrix_bytes(config) + gate_sums_bytes(config);
}

// Host memory while a checkpoint is written: the sums once more, with the output projection's
// metric, as statistics and as the bytes of the file, `copies` of sums as bytes, matrices of all
// heads as they will be in the file, packed and before that, and what the file's library holds.
int64_t record_bytes(const ModelConfig& config, size_t copies, bool attended) {
  constexpr int64_t kLibraryBytes = int64_t{32} << 20;
  return 2 * (sums_bytes(config, attended) + matrix_bytes(config)) +
         snapshot_bytes(config, copies, attended) +
         2 * datasets_together() * layer_matrix_bytes(config) + kLibraryBytes;
}

}  // namespace

int64_t gate_sums_bytes(const ModelConfig& config) {
  if (!config.has_output_gates()) return 0;
  return matrix_bytes(config) / config.num_kv_heads * config.num_qo_heads;
}

int64_t snapshot_bytes(const ModelConfig& config, size_t count, bool attended) {
  // Without the output projection's metric, which is no sum.
  return static_cast<int64_t>(count) * sums_bytes(config, attended);
}

std::vector<MemoryNeed> statistics_needs(const ModelConfig& config, const StatisticsSize& size) {
  // Sums of the blocks before lie beside those of the block, and are copied when they are saved;
  // shared, beside those of the next block too, with a copy of both on the host and one of the
  // block of each other process.
  const bool shared = size.processes > 1;
  const size_t more = shared ? static_cast<size_t>(size.processes) + 1 : 0;
  std::vector<MemoryNeed> needs = {
      {.name = "sums of the statistics",
       .compute_bytes = (shared ? 3 : 2) * sums_bytes(config, size.attended)},
      {.name = "copies of the sums",
       .host_bytes = snapshot_bytes(config, size.snapshots + more, size.attended) +
                     (shared ? 2 * matrix_bytes(config) : 0)}};
  if (size.saved) {
    needs.push_back({.name = "writing a checkpoint",
                     .moment = Moment::kSaving,
                     .host_bytes = record_bytes(config, size.snapshots + 1, size.attended) +
                                   snapshot_bytes(config, 1, size.attended)});
  }
  return needs;
}

// The two passes, each with its needs.

namespace {

void add(std::vector<MemoryNeed> more, MemoryNeeds& needs) {
  needs.held.insert(needs.held.end(), std::make_move_iterator(more.begin()),
                    std::make_move_iterator(more.end()));
}

// What the observer of attended sums takes beside a batch of so many tokens.
int64_t attended_workspace_bytes(const ModelConfig& config, int64_t batch_tokens,
                                 torch::Device device) {
  // Keys in float32; blocks of scores, as they are, as weights, squared and masked; blocks of rows
  // before RoPE with what that takes, then in float64 with and without their weights.
  const int64_t kv = int64_t{config.num_kv_heads} * config.head_dim;
  const int64_t scores =
      std::min(attended_scores(device), config.num_qo_heads * batch_tokens * batch_tokens);
  return 4 * kv * batch_tokens + 4 * 4 * scores +
         (5 * 4 + 2 * 8) * kv * std::min(batch_tokens, attended_rows(device));
}

// The forward pass, observed for sums.
MemoryNeeds pass_needs(const Transformer& model, const std::vector<Batch>& batches, bool attended) {
  const int64_t longest = longest_batch(batches);
  return model_needs(
      model, longest,
      attended ? attended_workspace_bytes(model.config(), longest, model.compute().device) : 0);
}

}  // namespace

CollectionPlan plan_collection(const Transformer& model,
                               const std::vector<std::vector<int32_t>>& sequences,
                               const CalibrateOptions& options, const MemoryLimits& limits,
                               int processes) {
  CollectionPlan plan;
  std::vector<Batch> batches = plan_batches(sequences, options.batch_tokens);
  plan.attended = attended_view(options).has_value();
  plan.block_tokens = plan_blocks(batches);
  plan.snapshot_tokens = plan_snapshots(batches);
  MemoryNeeds needs = pass_needs(model, batches, plan.attended);
  add(statistics_needs(model.config(), {.snapshots = plan.snapshot_tokens.size(),
                                        .attended = plan.attended,
                                        .saved = true,
                                        .processes = processes}),
      needs);
  needs.hidden_saved = true;
  // Shared, sums of a block are added and saved while the next one passes.
  needs.saved_meanwhile = processes > 1;
  needs.hint =
      "raise the limit, or run fewer tokens together: --batch-tokens, and a --sequence-length no "
      "longer "
      "than that";
  static_cast<RunPlan&>(plan) = plan_run(std::move(batches), std::move(needs), limits,
                                         model.compute().device, options.checkpoint_every);
  return plan;
}

RunPlan plan_search(const Transformer& model, const SplitCorpus& split,
                    const CalibrateOptions& options, const MemoryLimits& limits) {
  const torch::Device device = model.compute().device;
  std::vector<Batch> batches = plan_batches(split.held_back.sequences, options.batch_tokens);
  const bool attended = attended_view(options).has_value();
  MemoryNeeds needs = pass_needs(model, batches, attended);
  // Complete sums are saved before the search, but beside a GPU while it begins.
  add(statistics_needs(model.config(), {.attended = attended, .saved = device.is_cuda()}), needs);
  needs.held.push_back({.name = "sums that fits start from",
                        .host_bytes = snapshot_bytes(model.config(), 1, attended)});
  add(search_needs(model.config(), held_back_size(split), options.fit, options.search, device),
      needs);
  needs.hidden_at_once = true;
  needs.most_side_by_side = kMostLayersTogether;
  needs.least = "the search of one layer";
  needs.hint = "raise the limit, or leave the search out: --search off";
  return plan_run(std::move(batches), std::move(needs), limits, device);
}

MemoryNeeds writing_needs(const Transformer& model, int64_t bundle_bytes) {
  MemoryNeeds needs = model_needs(model, 0);
  needs.streamed_layers = needs.all_layers = 0;  // released by then
  needs.held.push_back({.name = "the bundle and its file", .host_bytes = 2 * bundle_bytes});
  return needs;
}

}  // namespace oscar
