// Sums that are saved, sent and taken up again.
#pragma once

#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "oscar/base/files.h"
#include "oscar/bundle/bundle.h"
#include "oscar/calibrate/collection_plan.h"
#include "oscar/calibrate/collector.h"
#include "oscar/calibrate/options.h"
#include "oscar/fit/statistics.h"
#include "oscar/model/layer_major.h"
#include "oscar/model/ranks.h"

namespace oscar {

// A layer's sums on their way from one process to another.

// Sums of visit_sums (fit/statistics.h) and counts, not the output projection's metric.
void send_sums(Ranks& ranks, int to, const LayerStatistics& sums);

// The next ones from a process, of a layer of the shape of `shape` and of so many tokens. Throws
// Error where they are none.
LayerStatistics receive_sums(Ranks& ranks, int from, const LayerStatistics& shape, int64_t tokens);

// Checkpoints beside OUT: when they are taken, what they hold, and whether they belong to this run.

struct SavedRun {
  // MomentPass::block(), ascending; a layer that has seen no token is absent.
  std::vector<LayerStatistics> statistics;
  SumSnapshots before, snapshots;  // MomentPass::blocks_before() and snapshots()
  RunPosition position;
  std::string started_utc;  // when the run began that was saved
};

// OUT from the beginning of a run on: no other run can write it meanwhile, and none its checkpoint,
// whose leftovers are removed. Throws Error when OUT or its checkpoint exists (and neither --force
// nor
// --resume is given), and when OUT cannot be written, or is being written.
class RunOutput {
 public:
  explicit RunOutput(const CalibrateOptions& options);
  AtomicFile& file() { return file_; }

 private:
  AtomicFile file_;
};

class CheckpointFile {
 public:
  // The checkpoint of `options.output`. `run` is the bundle as described before any layer is known.
  // `expected_bytes` as for SavePace.
  CheckpointFile(const CalibrateOptions& options, const Bundle& run, int64_t expected_bytes = 0);

  // At wave ends, and at layer ends while weights stream; always when a stop was requested. Left
  // out while saving would take more than a twentieth of the run's time, or goes on. Throws what
  // saving in another thread threw.
  bool due(const RunPosition& next, const RunPlan& plan, bool stop_requested);
  // `statistics`: of all tokens, or with `before` those of a block (MomentPass).
  void save(std::vector<LayerStatistics> statistics, const RunPosition& next,
            const SumSnapshots& before = {}, const SumSnapshots& snapshots = {});
  // The same in another thread, at a wave's end: hidden states would stay in memory.
  void save_meanwhile(std::vector<LayerStatistics> statistics, const RunPosition& next,
                      const SumSnapshots& before, const SumSnapshots& snapshots);
  // Until that is over. Throws what it threw.
  void wait();
  // The same where it does not matter what came of it: another save follows, or the run is over.
  void settle();

  // The saved run, or nullopt when there is no checkpoint. It continues under `plan`, whatever plan
  // saved it. Throws Error when it is another run's, when position and sums do not agree, or when
  // its hidden states take more memory than `plan` has for them.
  std::optional<SavedRun> load(const CollectionPlan& plan);
  void remove();
  // The same, of a checkpoint of this run alone: what a kill after writing OUT left.
  void remove_if_own();
  const std::filesystem::path& path() const { return path_; }

 private:
  // Writes what was put together when it was called.
  std::function<void()> writing(std::vector<LayerStatistics> statistics, const RunPosition& next,
                                const SumSnapshots& before, const SumSnapshots& snapshots);

  std::filesystem::path path_;
  const Bundle& run_;
  SavePace pace_;
  std::future<void> saving_;
};

// Whether OUT is the finished bundle of this very run. Throws Error when it is another run's and
// --force is not given, or no bundle.
bool is_finished_output(const CalibrateOptions& options, const Bundle& run);

}  // namespace oscar
