// Sums that are saved, sent and taken up again.
#include "oscar/calibrate/resume.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/calibrate/collector.h"
#include "oscar/fit/statistics.h"

namespace oscar {

// A layer's sums as bytes: in a checkpoint, and on their way between processes.

// The sums of visit_sums (fit/statistics.h), count_q and count_kv, in float64; not the output
// projection's metric.
std::vector<uint8_t> sums_to_bytes(const LayerStatistics& sums);

// Sums of a layer with the geometry of `shape`, attended ones where it has any, and of so many
// tokens. Calls `refuse`, which throws, where `bytes` are none.
using RefuseSums = std::function<void(const std::string& expected, const std::string& found)>;
std::shared_ptr<const LayerStatistics> sums_from_bytes(std::span<const uint8_t> bytes,
                                                       const LayerStatistics& shape, int64_t tokens,
                                                       const RefuseSums& refuse);

inline constexpr const char* kSnapshot = "snapshot";
inline constexpr const char* kBlocksBefore = "before";

// Adds one tensor of f64 a copy, named by `kind`, the copy's number and its layer.
void save_copies(const char* kind, const SumSnapshots& copies, std::vector<ResumeTensor>& tensors);

// The copies of a kind among `tensors`: `wanted` says of how many tokens a layer of `statistics`
// must have them. Throws Error naming `file` where one is missing or of other tokens.
using WantedCopies = std::function<std::vector<int64_t>(const LayerGeometry&)>;
SumSnapshots load_copies(const char* kind, const std::vector<ResumeTensor>& tensors,
                         const std::vector<LayerStatistics>& statistics, const WantedCopies& wanted,
                         const std::string& file);

// Sums one after another, then their counts.

namespace {

constexpr const char* kDtype = "f64";
constexpr size_t kCounts = 2;  // of rows of queries, and of tokens

std::string copy_name(const char* kind, size_t index, int layer) {
  return fmt::format("{}_{}_{:06d}", kind, index, layer);
}

// Of all sums, and the counts.
size_t num_values(const LayerStatistics& sums) {
  size_t count = kCounts;
  visit_sums([&](const std::vector<double>& values) { count += values.size(); }, sums);
  return count;
}

}  // namespace

std::vector<uint8_t> sums_to_bytes(const LayerStatistics& sums) {
  std::vector<uint8_t> bytes;
  bytes.reserve(num_values(sums) * sizeof(double));
  const auto append = [&](const std::vector<double>& values) {
    const auto* first = reinterpret_cast<const uint8_t*>(values.data());
    bytes.insert(bytes.end(), first, first + values.size() * sizeof(double));
  };
  visit_sums(append, sums);
  append({static_cast<double>(sums.count_q), static_cast<double>(sums.count_kv)});
  return bytes;
}

std::shared_ptr<const LayerStatistics> sums_from_bytes(std::span<const uint8_t> bytes,
                                                       const LayerStatistics& shape, int64_t tokens,
                                                       const RefuseSums& refuse) {
  auto sums = std::make_shared<LayerStatistics>(make_statistics(shape.geometry));
  sums->o_proj_metric = {};
  if (!shape.attended.empty()) sums->attended = make_attended_sums(shape.geometry);
  if (!shape.gate_moment.empty()) sums->gate_moment = make_gate_moment(shape.geometry);
  const size_t count = num_values(*sums);
  if (bytes.size() != count * sizeof(double)) {
    refuse(fmt::format("{} values", count), fmt::format("{} bytes", bytes.size()));
  }
  const uint8_t* next = bytes.data();
  bool finite = true;
  const auto take = [&](std::vector<double>& values) {
    const size_t size = values.size() * sizeof(double);
    std::memcpy(values.data(), next, size);
    next += size;
    finite = finite && std::ranges::all_of(values, [](double x) { return std::isfinite(x); });
  };
  visit_sums(take, *sums);
  std::vector<double> counts(kCounts);
  take(counts);
  const auto rows_per_token = static_cast<double>(shape.count_q / shape.count_kv);
  const auto wanted = static_cast<double>(tokens);
  if (!finite || counts[0] != wanted * rows_per_token || counts[1] != wanted) {
    refuse(fmt::format("finite sums of {} tokens", tokens), fmt::format("{} tokens", counts[1]));
  }
  sums->count_q = static_cast<int64_t>(counts[0]);
  sums->count_kv = tokens;
  return sums;
}

void save_copies(const char* kind, const SumSnapshots& copies, std::vector<ResumeTensor>& tensors) {
  std::map<int, size_t> numbers;
  for (const auto& copy : copies) {
    const int layer = copy->geometry.layer_id;
    std::vector<uint8_t> bytes = sums_to_bytes(*copy);
    const auto values = static_cast<int64_t>(bytes.size() / sizeof(double));
    tensors.push_back(
        {.name = copy_name(kind, numbers[layer]++, layer), .dtype = kDtype, .shape = {values}});
    tensors.back().own(std::move(bytes));
  }
}

SumSnapshots load_copies(const char* kind, const std::vector<ResumeTensor>& tensors,
                         const std::vector<LayerStatistics>& statistics, const WantedCopies& wanted,
                         const std::string& file) {
  SumSnapshots copies;
  for (const LayerStatistics& sums : statistics) {
    const std::vector<int64_t> tokens = wanted(sums.geometry);
    for (size_t i = 0; i < tokens.size(); ++i) {
      const std::string name = copy_name(kind, i, sums.geometry.layer_id);
      const auto refuse = [&](const std::string& expected, const std::string& found) {
        refuse_damaged_checkpoint(file + ", " + name, expected, found);
      };
      const auto tensor = std::ranges::find(tensors, name, &ResumeTensor::name);
      if (tensor == tensors.end()) refuse("sums", "none");
      if (tensor->dtype != kDtype) refuse(kDtype, tensor->dtype);
      copies.push_back(sums_from_bytes(tensor->bytes, sums, tokens[i], refuse));
    }
  }
  return copies;
}

// As a copy of sums lies in a checkpoint.

void send_sums(Ranks& ranks, int to, const LayerStatistics& sums) {
  ranks.send(to, sums_to_bytes(sums));
}

LayerStatistics receive_sums(Ranks& ranks, int from, const LayerStatistics& shape, int64_t tokens) {
  const auto refuse = [&](const std::string& expected, const std::string& found) {
    throw Error({.what = "sums that another process sent are not those of this layer",
                 .where = "process " + std::to_string(from) + ", layer " +
                          std::to_string(shape.geometry.layer_id),
                 .expected = expected,
                 .found = found});
  };
  return *sums_from_bytes(ranks.receive(from), shape, tokens, refuse);
}

// Saving and restoring a run. Sums are saved to the bit, so resuming changes nothing.

namespace {

// How the numbers of a ResumeState count: `shard` is RunPosition::batch, which does not depend on
// how a plan groups batches into waves. Checkpoints of order "layer-major" counted waves of a
// plan that they did not describe, those of "layer-major, batches" had no copies of sums, those of
// "layer-major, batches, snapshots" no blocks.
constexpr const char* kOrder = "layer-major, batches, blocks";
constexpr const char* kHiddenPrefix = "hidden_";
constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

const char* dtype_text(torch::Dtype dtype) { return dtype == torch::kBFloat16 ? "bf16" : "fp32"; }

// Of a tensor on the host the bytes are its own.
ResumeTensor to_saved(const torch::Tensor& hidden, size_t index) {
  auto host = std::make_shared<const torch::Tensor>(hidden.to(torch::kCPU).contiguous());
  return {.name = fmt::format("{}{:06d}", kHiddenPrefix, index),
          .dtype = dtype_text(host->scalar_type()),
          .shape = host->sizes().vec(),
          .bytes = {static_cast<const uint8_t*>(host->data_ptr()), host->nbytes()},
          .owner = host};
}

// Whether a tensor of this shape has so many bytes.
bool has_bytes(const std::vector<int64_t>& shape, int64_t element, int64_t bytes) {
  int64_t size = element;
  for (const int64_t extent : shape) {
    if (extent <= 0 || size > bytes / extent) return false;
    size *= extent;
  }
  return size == bytes;
}

// Takes `saved`, so that no more than one tensor is there twice.
torch::Tensor from_saved(const std::string& file, ResumeTensor saved) {
  const auto dtype = saved.dtype == "bf16" ? torch::kBFloat16 : torch::kFloat32;
  const auto element = static_cast<int64_t>(torch::elementSize(dtype));
  if (!has_bytes(saved.shape, element, static_cast<int64_t>(saved.bytes.size()))) {
    refuse_damaged_checkpoint(file + ", " + saved.name,
                              fmt::format("[{}] of {}", fmt::join(saved.shape, ", "), saved.dtype),
                              fmt::format("{} bytes", saved.bytes.size()));
  }
  torch::Tensor hidden = torch::empty(saved.shape, dtype);
  std::memcpy(hidden.data_ptr(), saved.bytes.data(), saved.bytes.size());
  return hidden;
}

// Indexes into `plan` and shapes of hidden states; they come from a file.
void check_position(const std::string& file, const RunPosition& position, const RunPlan& plan,
                    const BundleModel& model) {
  const size_t batches = plan.batches.size();
  if (position.batch > batches || position.hidden.size() > batches - position.batch) {
    refuse_damaged_checkpoint(
        file, fmt::format("a position within {} batches", batches),
        fmt::format("batch {} and {} begun", position.batch, position.hidden.size()));
  }
  const bool between_layers = position.layer > 0 && position.layer < model.num_layers;
  if (position.hidden.empty() ? position.layer != 0 : !between_layers) {
    refuse_damaged_checkpoint(
        file, fmt::format("a layer of {}", model.num_layers),
        fmt::format("layer {}, {} begun", position.layer, position.hidden.size()));
  }
  for (size_t i = 0; i < position.hidden.size(); ++i) {
    const Batch& batch = plan.batches[position.batch + i];
    const std::vector<int64_t> expected = {batch.num_sequences, batch.length, model.hidden_size};
    const std::vector<int64_t> found = position.hidden[i].sizes().vec();
    if (found != expected) {
      refuse_damaged_checkpoint(fmt::format("{}, hidden states {}", file, i),
                                fmt::format("[{}]", fmt::join(expected, ", ")),
                                fmt::format("[{}]", fmt::join(found, ", ")));
    }
  }
}

// Tokens that a layer has seen at a position.
int64_t tokens_seen(const RunPosition& position, const RunPlan& plan, int layer) {
  const size_t begun = layer < position.layer ? position.hidden.size() : 0;
  return tokens_of(plan, 0, position.batch + begun);
}

// What MomentPass::blocks_before() counts of a layer that has seen so many.
int64_t tokens_before(const CollectionPlan& plan, int64_t seen) {
  const int64_t start = block_start(plan, seen);
  return start < seen ? start : 0;
}

// Each layer has counted the tokens that `position` says it has seen.
void check_sums(const std::string& file, const SavedRun& run, const CollectionPlan& plan,
                int num_layers) {
  std::map<int, int64_t> counted;
  std::set<int> local;
  for (const LayerStatistics& layer : run.statistics) {
    counted[layer.geometry.layer_id] = layer.count_kv;
    if (!layer.geometry.fitted()) local.insert(layer.geometry.layer_id);
  }
  for (int layer = 0; layer < num_layers; ++layer) {
    if (local.contains(layer)) continue;
    const int64_t seen = tokens_seen(run.position, plan, layer);
    const int64_t expected = seen - tokens_before(plan, seen);
    if (counted[layer] == expected) continue;
    refuse_damaged_checkpoint(fmt::format("{}, layer {}, count_kv", file, layer),
                              std::to_string(expected), std::to_string(counted[layer]));
  }
}

void check_memory(const std::string& file, const RunPosition& position, const RunPlan& plan) {
  const int64_t tokens = tokens_of(plan, position.batch, position.hidden.size());
  const int64_t bytes = tokens * plan.hidden_bytes_per_token;
  if (bytes <= plan.memory.hidden_room) return;
  throw Error({.what = "the checkpoint was taken between two layers, and its hidden states take "
                       "more memory than this run has for them",
               .where = file,
               .expected = fmt::format("at most {:.3f} GiB",
                                       static_cast<double>(plan.memory.hidden_room) / kGiB),
               .found = fmt::format("{:.3f} GiB", static_cast<double>(bytes) / kGiB),
               .hint = "resume with the --host-memory or --gpu-memory that it was taken with (or "
                       "more), or delete it and start anew"});
}

}  // namespace

RunOutput::RunOutput(const CalibrateOptions& options)
    : file_(options.output, options.force ? Replace::kYes
                            : options.resume && std::filesystem::exists(options.output)
                                ? Replace::kIfUnchanged
                                : Replace::kNo) {
  if (file_.is_stream()) {
    throw Error({.what = "OUT is no file, and checkpoints are kept beside it",
                 .where = options.output.string(),
                 .hint = "write a file, and copy it there"});
  }
  const std::filesystem::path checkpoint = checkpoint_path(options.output);
  if (!options.force && !options.resume) refuse_to_replace_checkpoint(checkpoint);
  const AtomicFile leftovers(checkpoint);
}

CheckpointFile::CheckpointFile(const CalibrateOptions& options, const Bundle& run,
                               int64_t expected_bytes)
    : path_(checkpoint_path(options.output)), run_(run), pace_(expected_bytes) {}

bool CheckpointFile::due(const RunPosition& next, const RunPlan& plan, bool stop_requested) {
  if (stop_requested) return true;
  if (saving_.valid()) {
    if (saving_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return false;
    wait();
  }
  const bool wave_end = next.layer == 0;
  if (wave_end && next.batch == plan.batches.size()) return false;
  if (!wave_end && plan.memory.weights_resident) return false;
  return pace_.due();
}

std::function<void()> CheckpointFile::writing(std::vector<LayerStatistics> statistics,
                                              const RunPosition& next, const SumSnapshots& before,
                                              const SumSnapshots& snapshots) {
  Bundle bundle = run_;
  bundle.statistics_only = true;
  bundle.statistics = std::move(statistics);
  // In the first wave: statistics of no token are refused when a file is read. Local layers, which
  // have none, stay: load() knows them by that.
  std::erase_if(bundle.statistics,
                [](const LayerStatistics& s) { return s.geometry.fitted() && s.count_kv == 0; });
  return [this, bundle = std::move(bundle), next, before, snapshots] {
    const auto start = SavePace::Clock::now();
    ResumeState state{.run_key = bundle.run_key,
                      .order = kOrder,
                      .shard = static_cast<int64_t>(next.batch),
                      .layer = next.layer};
    save_copies(kBlocksBefore, before, state.tensors);
    save_copies(kSnapshot, snapshots, state.tensors);
    for (size_t i = 0; i < next.hidden.size(); ++i) {
      state.tensors.push_back(to_saved(next.hidden[i], i));
    }
    write_checkpoint(path_, bundle, state);
    pace_.saved(start);
  };
}

void CheckpointFile::save(std::vector<LayerStatistics> statistics, const RunPosition& next,
                          const SumSnapshots& before, const SumSnapshots& snapshots) {
  settle();
  writing(std::move(statistics), next, before, snapshots)();
}

void CheckpointFile::save_meanwhile(std::vector<LayerStatistics> statistics,
                                    const RunPosition& next, const SumSnapshots& before,
                                    const SumSnapshots& snapshots) {
  wait();
  saving_ = std::async(std::launch::async,
                       [write = writing(std::move(statistics), next, before, snapshots)]() mutable {
                         const std::function<void()> own =
                             std::move(write);  // freed before it is waited for
                         own();
                       });
}

void CheckpointFile::wait() {
  if (saving_.valid()) saving_.get();
}

void CheckpointFile::settle() {
  if (saving_.valid()) saving_.wait();
  saving_ = {};
}

void CheckpointFile::remove() {
  settle();
  remove_checkpoint(path_);
}

std::optional<SavedRun> CheckpointFile::load(const CollectionPlan& plan) {
  std::optional<RunCheckpoint> own = read_own_checkpoint(
      path_,
      {run_.run_key, kOrder, "the same weights, config.json, corpus, options and kind of device"});
  if (!own) return std::nullopt;
  RunCheckpoint& saved = *own;
  SavedRun run;
  run.started_utc = saved.bundle.created_utc;
  run.statistics = std::move(saved.bundle.statistics);
  run.position.batch = static_cast<size_t>(saved.state.shard);
  run.position.layer = saved.state.layer;
  for (ResumeTensor& tensor : saved.state.tensors) {
    if (!tensor.name.starts_with(kHiddenPrefix)) continue;
    run.position.hidden.push_back(from_saved(path_.string(), std::exchange(tensor, {})));
  }
  check_position(path_.string(), run.position, plan, run_.model);
  check_sums(path_.string(), run, plan, run_.model.num_layers);
  check_memory(path_.string(), run.position, plan);
  const auto load = [&](const char* kind, const WantedCopies& wanted) {
    return load_copies(kind, saved.state.tensors, run.statistics, wanted, path_.string());
  };
  run.before = load(kBlocksBefore, [&](const LayerGeometry& layer) {
    const int64_t tokens = tokens_before(plan, tokens_seen(run.position, plan, layer.layer_id));
    return layer.fitted() && tokens > 0 ? std::vector<int64_t>{tokens} : std::vector<int64_t>();
  });
  run.snapshots = load(kSnapshot, [&](const LayerGeometry& layer) {
    std::vector<int64_t> tokens = plan.snapshot_tokens;
    const int64_t seen = tokens_seen(run.position, plan, layer.layer_id);
    std::erase_if(tokens, [&](int64_t mark) { return !layer.quantized || mark > seen; });
    return tokens;
  });
  return run;
}

void CheckpointFile::remove_if_own() {
  if (!std::filesystem::exists(path_)) return;
  try {
    if (read_checkpoint(path_).state.run_key == run_.run_key) remove();
  } catch (const Error&) {
    return;  // whatever it is, it is not this run's
  }
}

bool is_finished_output(const CalibrateOptions& options, const Bundle& run) {
  if (!std::filesystem::exists(options.output)) return false;
  const Bundle found = read_with_hint(
      [&] { return read_bundle(options.output); },
      "--resume continues towards OUT: choose another name for OUT, or remove this file");
  if (found.run_key == run.run_key) return true;
  if (options.force) return false;
  throw Error({.what = "OUT exists already and is of another run",
               .where = options.output.string(),
               .hint = "choose another name, or replace it with --force"});
}

}  // namespace oscar
