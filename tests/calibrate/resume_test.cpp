#include "oscar/calibrate/resume.h"

#include <gtest/gtest.h>
#include <fstream>
#include <functional>
#include <thread>

#include "calibrate/small_run.h"
#include "oscar/base/error.h"
#include "oscar/bundle/run_checkpoint.h"
#include "oscar/calibrate/assemble.h"
#include "oscar/fit/convergence.h"

// A run that stopped anywhere under one plan continues under any other to the same sums, or is
// refused.

namespace {

using namespace oscar;
using namespace oscar_test;

constexpr int kLayers = 3;

std::string three_layers() {
  std::string text = kSmallConfig;
  const std::string two = "\"num_hidden_layers\":2";
  return text.replace(text.find(two), two.size(), "\"num_hidden_layers\":3");
}

// Nine sequences that make seven batches.
class Resume : public SmallRun {
 protected:
  Resume()
      : SmallRun(three_layers(), small_corpus({5, 5, 8, 8, 8, 3, 3, 6, 6}), /*batch_tokens=*/10,
                 {.position_span = 128}) {}

  std::vector<LayerStatistics> sums(const CollectionPlan& plan) { return collect(plan).statistics; }

  // The checkpoint of a run that stopped after `layer_passes`.
  SavedRun stop_after(const CollectionPlan& plan, int layer_passes) {
    EXPECT_THROW(collect(plan, layer_passes), Stopped);
    return CheckpointFile(options_, run_).load(plan).value();
  }

  std::string refusal(const CollectionPlan& plan) {
    try {
      CheckpointFile(options_, run_).load(plan);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }
};

int64_t memory_of_this_process(const std::string& what) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (int64_t kibibytes = 0; word == what + ":" && status >> kibibytes) return kibibytes << 10;
  }
  throw std::runtime_error("/proc/self/status has no " + what);
}

// By how much the memory of this process rises, at most, while `work` is done.
int64_t peak_growth(const std::function<void()>& work) {
  std::ofstream("/proc/self/clear_refs") << 5;  // the peak is what is there now
  const int64_t before = memory_of_this_process("VmRSS");
  EXPECT_LT(memory_of_this_process("VmHWM"), before + (int64_t{4} << 20));
  work();
  return memory_of_this_process("VmHWM") - before;
}

TEST_F(Resume, AnyStopContinuesUnderAnyPlanToTheSameSums) {
  const auto whole = sums(plan(7));
  check_counts(whole, corpus_.record.tokens);
  for (const size_t before : {2, 7}) {
    for (const size_t after : {1, 3}) {
      const int passes = kLayers * static_cast<int>(plan(before).waves.size());
      for (int stop = 1; stop <= passes; ++stop) {
        EXPECT_THROW(collect(plan(before), stop), Stopped);
        EXPECT_EQ(sums(plan(after)), whole)
            << "waves of " << before << ", stopped after " << stop << " passes of a layer, resumed "
            << "with waves of " << after;
      }
    }
  }
}

TEST_F(Resume, StoppingAgainAndAgainUnderChangingPlansGivesTheSameSums) {
  const auto whole = sums(plan(7));
  for (const size_t size : {1, 2, 3, 1, 4, 2, 5}) {
    EXPECT_THROW(collect(plan(size), 2), Stopped) << "waves of " << size;
  }
  EXPECT_EQ(sums(plan(3)), whole);
}

TEST_F(Resume, WhatIsSavedBesideTheRunIsWhatItHadThen) {
  const auto whole = sums(plan(7));
  const CollectionPlan by_two = plan(2);
  for (size_t last = 1; last < by_two.waves.size(); ++last) {
    size_t ends = 0;
    {
      CheckpointFile file(options_, run_);
      MomentPass pass(*model_.transformer, layers_,
                      [&](const MomentPass& sums, const RunPosition& next) {
                        if (next.layer != 0 || ++ends > last) return;
                        file.save_meanwhile(sums.block(), next, sums.blocks_before(), {});
                      },
                      {by_two.block_tokens, by_two.snapshot_tokens});
      SilentProgress progress;
      run_layer_major(*model_.transformer, corpus_, by_two, {}, pass, progress);
    }
    EXPECT_EQ(CheckpointFile(options_, run_).load(by_two)->position.batch, 2 * last);
    EXPECT_EQ(sums(plan(1)), whole) << "saved after " << last << " waves";
  }
}

TEST_F(Resume, AnErrorOfSavingBesideTheRunIsThrownWhereItAsksToSaveAgain) {
  const SavedRun saved = stop_after(plan(1), kLayers);
  options_.output = folder_.path() / "no folder" / "out.h5";
  CheckpointFile file(options_, run_);
  file.save_meanwhile(saved.statistics, {1, 0, {}}, {}, {});
  EXPECT_THROW(while (!file.due({2, 0, {}}, plan(1), false)) std::this_thread::yield(),
               std::exception);
  EXPECT_NO_THROW(file.wait()) << "told once";

  file.save_meanwhile(saved.statistics, {1, 0, {}}, {}, {});
  std::filesystem::create_directory(options_.output.parent_path());
  file.save(saved.statistics, saved.position, saved.before, saved.snapshots);
  EXPECT_TRUE(file.load(plan(1))) << "what is saved then takes the place of what could not be";
}

TEST_F(Resume, ALocalLayerOfWhichNothingIsCollectedIsNoDamage) {
  layers_[1].attention = AttentionKind::kLocal;
  layers_[1].sliding_window = 300;
  layers_[1].quantized = false;
  const auto whole = sums(plan(7));
  for (int stop = 1; stop <= 3 * kLayers; ++stop) {
    EXPECT_THROW(collect(plan(2), stop), Stopped);
    EXPECT_EQ(sums(plan(3)), whole) << "stopped after " << stop << " passes of a layer";
  }
}

TEST_F(Resume, ACompleteCollectionStaysCompleteUnderAPlanWithMoreWaves) {
  const auto whole = sums(plan(7));
  EXPECT_EQ(stop_after(plan(7), kLayers).position.batch, 7u);
  EXPECT_EQ(sums(plan(1)), whole);
}

TEST_F(Resume, RefusesHiddenStatesThatDoNotFitAndSaysWhatToDo) {
  CollectionPlan small = plan(1);
  small.memory.hidden_room = 8 * small.hidden_bytes_per_token;
  stop_after(plan(7), 1);  // all batches have passed layer 0
  const std::string text = refusal(small);
  EXPECT_NE(text.find("--host-memory"), std::string::npos) << text;
  EXPECT_EQ(refusal(plan(1)), "accepted");
  CheckpointFile(options_, run_).remove();
  stop_after(plan(3), kLayers);  // the end of a wave: nothing between layers
  EXPECT_EQ(refusal(small), "accepted");
}

TEST_F(Resume, RefusesCheckpointsThatCountWaves) {
  SavedRun saved = stop_after(plan(1), kLayers);
  Bundle bundle = run_;
  bundle.statistics_only = true;
  bundle.statistics = saved.statistics;
  write_checkpoint(CheckpointFile(options_, run_).path(), bundle,
                   {.run_key = run_.run_key, .order = "layer-major", .shard = 1});
  const std::string text = refusal(plan(1));
  EXPECT_NE(text.find("another version"), std::string::npos) << text;
  EXPECT_NE(text.find("delete it"), std::string::npos) << text;
}

TEST_F(Resume, RefusesAnotherRun) {
  stop_after(plan(1), kLayers);
  run_.run_key = "another";
  EXPECT_NE(refusal(plan(1)).find("another run"), std::string::npos);
}

TEST_F(Resume, RefusesPositionsThatTheSumsOrTheCorpusContradict) {
  SavedRun saved = stop_after(plan(2), kLayers + 1);  // batches 2 and 3 have passed layer 0
  ASSERT_EQ(saved.position.batch, 2u);
  ASSERT_EQ(saved.position.hidden.size(), 2u);
  const auto refused = [&](const char* word, auto change) {
    RunPosition position = saved.position;
    change(position);
    CheckpointFile(options_, run_).save(saved.statistics, position);
    const std::string text = refusal(plan(1));
    EXPECT_NE(text.find(word), std::string::npos) << text;
  };
  refused("count_kv", [](RunPosition& p) { p.layer = 2; });
  refused("count_kv", [](RunPosition& p) { p = {2, 0, {}}; });
  refused("count_kv", [](RunPosition& p) { p = {4, 0, {}}; });
  refused("hidden states", [](RunPosition& p) { p.batch = 3; });
  refused("a position within 7 batches", [](RunPosition& p) { p.batch = 6; });
  refused("a position within 7 batches", [](RunPosition& p) { p = {8, 0, {}}; });
  refused("a layer of 3", [](RunPosition& p) { p.layer = 3; });
  refused("a layer of 3", [](RunPosition& p) { p.hidden.clear(); });
  refused("accepted", [](RunPosition&) {});
}

TEST_F(Resume, RefusesHiddenStatesWhoseShapeIsNotThatOfTheirBytes) {
  const SavedRun saved = stop_after(plan(2), kLayers + 1);
  Bundle bundle = run_;
  bundle.statistics_only = true;
  bundle.statistics = saved.statistics;
  const CheckpointFile file(options_, run_);
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{4, 8}, {-8, -8}, {int64_t{1} << 32, int64_t{1} << 32, 64}, {}}) {
    ResumeState state = read_checkpoint(file.path()).state;
    const auto hidden = std::ranges::find(state.tensors, "hidden_000000", &ResumeTensor::name);
    ASSERT_NE(hidden, state.tensors.end());
    hidden->shape = shape;
    write_checkpoint(file.path(), bundle, state);
    const std::string text = refusal(plan(1));
    EXPECT_NE(text.find("hidden_000000"), std::string::npos) << text;
    EXPECT_NE(text.find("delete it"), std::string::npos) << text;
  }
}

// As many as the memory of a run has room for.
TEST_F(Resume, HiddenStatesAreThereOnceWhileTheyAreSavedAndOnceWhileTheyAreRead) {
  constexpr int64_t kMiB = int64_t{1} << 20;
  const SavedRun saved = stop_after(plan(2), kLayers + 1);
  RunPosition position{0, 1, {}};
  for (int i = 0; i < 8; ++i) position.hidden.push_back(torch::ones({8, kMiB / 4}));
  CheckpointFile file(options_, run_);
  const auto save = [&] { file.save(saved.statistics, position); };
  EXPECT_LT(peak_growth(save), 16 * kMiB);
  position.hidden.clear();
  const auto load = [&] { EXPECT_NE(refusal(plan(1)).find("damaged"), std::string::npos); };
  EXPECT_LT(peak_growth(load), (64 + 8 + 16) * kMiB) << "one tensor is there twice";
}

TEST_F(Resume, TokensThatWereCountedTwiceOrNotAtAllStopTheRun) {
  auto statistics = sums(plan(7));
  EXPECT_NO_THROW(check_counts(statistics, corpus_.record.tokens));
  statistics[1].count_kv += 8;
  try {
    check_counts(statistics, corpus_.record.tokens);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("layer 1, count_kv"), std::string::npos);
  }
}

}  // namespace

// Copies of running sums: where they are taken, that neither plan nor resuming changes them, and
// that a checkpoint without them is refused.

namespace {

using namespace oscar;
using namespace oscar_test;

constexpr int kSnapshotLayers = 2, kSequences = 24, kLength = 32;

std::vector<Batch> batches_of(std::initializer_list<int> lengths) {
  std::vector<Batch> batches;
  for (const int length : lengths) {
    batches.push_back({static_cast<int64_t>(batches.size()), 1, length});
  }
  return batches;
}

TEST(PlanSnapshots, StandAtTheBatchEndsNearestToAQuarterAndAHalf) {
  EXPECT_EQ(plan_snapshots(batches_of({10, 10, 10, 10})), (std::vector<int64_t>{10, 20}));
  EXPECT_EQ(plan_snapshots(batches_of({7, 7, 7, 7, 7, 7, 7})), (std::vector<int64_t>{14, 21}));
  EXPECT_EQ(plan_snapshots(batches_of({1, 1, 1, 97})), (std::vector<int64_t>{3}));
}

TEST(PlanSnapshots, NeverHoldEverythingAndNeverRepeat) {
  EXPECT_EQ(plan_snapshots(batches_of({10, 10})), (std::vector<int64_t>{10}));
  EXPECT_EQ(plan_snapshots(batches_of({1, 99})), (std::vector<int64_t>{1}));
  EXPECT_EQ(plan_snapshots(batches_of({99, 1})), (std::vector<int64_t>{99}));
  EXPECT_TRUE(plan_snapshots(batches_of({100})).empty());
  EXPECT_TRUE(plan_snapshots({}).empty());
}

TEST(PlanBlocks, EndAtTheBatchEndsNearestToEachEighthAndAtTheEnd) {
  EXPECT_EQ(plan_blocks(std::vector<Batch>(16, Batch{0, 1, 5})),
            (std::vector<int64_t>{10, 20, 30, 40, 50, 60, 70, 80}));
  EXPECT_EQ(plan_blocks(batches_of({10, 10, 10})), (std::vector<int64_t>{10, 20, 30}));
  EXPECT_EQ(plan_blocks(batches_of({1, 1, 1, 97})), (std::vector<int64_t>{3, 100}));
  EXPECT_EQ(plan_blocks(batches_of({100})), (std::vector<int64_t>{100}));
  EXPECT_TRUE(plan_blocks({}).empty());
}

TEST(PlanBlocks, BeginWhereTheOneBeforeEnds) {
  CollectionPlan plan;
  plan.block_tokens = {10, 20};
  EXPECT_EQ(block_start(plan, 9), 0);
  EXPECT_EQ(block_start(plan, 10), 10);
  EXPECT_EQ(block_start(plan, 19), 10);
  EXPECT_EQ(block_start(plan, 20), 20);
}

class Snapshots : public SmallRun {
 protected:
  Snapshots()
      : SmallRun(kSmallConfig, small_corpus(std::vector<int>(kSequences, kLength)),
                 /*batch_tokens=*/2 * kLength, {.center = true}) {}

  CollectionPlan plan(size_t batches_per_wave) const {
    CollectionPlan plan = SmallRun::plan(batches_per_wave);
    plan.snapshot_tokens = plan_snapshots(plan.batches);
    return plan;
  }

  static void expect_equal(const SumSnapshots& a, const SumSnapshots& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(*a[i], *b[i]) << "copy " << i;
  }

  Json judged(const CollectionPlan& plan, const Sums& sums) {
    SilentProgress progress;
    return judge_convergence(sums.snapshots, sums.statistics, plan, options_.fit, {}, false,
                             progress);
  }
};

TEST_F(Snapshots, AreTheSumsOfTheBatchesBeforeThem) {
  const CollectionPlan all = plan(12);
  const auto whole = collect(all);
  ASSERT_EQ(whole.snapshots.size(), 2U * kSnapshotLayers);
  corpus_.sequences.resize(kSequences / 2);
  corpus_.record.tokens /= 2;
  CollectionPlan half = plan(6);
  half.block_tokens = all.block_tokens;
  half.snapshot_tokens.clear();
  auto first = collect(half).statistics;
  for (int layer = 0; layer < kSnapshotLayers; ++layer) {
    first[layer].o_proj_metric = {};
    EXPECT_EQ(*whole.snapshots[2 * layer + 1], first[layer]) << "layer " << layer;
    EXPECT_EQ(whole.snapshots[2 * layer]->count_kv, kSequences * kLength / 4);
  }
}

TEST_F(Snapshots, AndSumsAreOfBlocksThatWereAddedInOrder) {
  const CollectionPlan whole = plan(12);
  ASSERT_EQ(whole.block_tokens.size(), 8U);
  const auto sums = collect(whole);
  const TokenSequences all = corpus_;
  std::vector<LayerStatistics> total;
  for (int64_t begin = 0; const int64_t end : whole.block_tokens) {
    corpus_.sequences.assign(all.sequences.begin() + begin / kLength,
                             all.sequences.begin() + end / kLength);
    CollectionPlan block = SmallRun::plan(12);
    block.block_tokens.clear();
    const auto part = collect(block).statistics;
    for (size_t layer = 0; layer < part.size() && begin > 0; ++layer) {
      add_statistics(total[layer], part[layer]);
    }
    if (begin == 0) total = part;
    begin = end;
  }
  EXPECT_EQ(sums.statistics, total);
}

TEST_F(Snapshots, DoNotChangeTheSums) {
  CollectionPlan without = plan(5);
  without.snapshot_tokens.clear();
  EXPECT_EQ(collect(plan(5)).statistics, collect(without).statistics);
}

TEST_F(Snapshots, AreTheSameUnderAnyPlanWhereverTheRunStopped) {
  const auto whole = collect(plan(12));
  const Json record = judged(plan(12), whole);
  for (const size_t before : {5, 12}) {
    const int passes = kSnapshotLayers * static_cast<int>(plan(before).waves.size());
    for (int stop = 1; stop <= passes; ++stop) {
      SCOPED_TRACE("stopped after " + std::to_string(stop) + " passes of a layer");
      EXPECT_THROW(collect(plan(before), stop), Stopped);
      const auto resumed = collect(plan(2));
      expect_equal(resumed.snapshots, whole.snapshots);
      EXPECT_EQ(judged(plan(2), resumed), record);
    }
  }
}

TEST_F(Snapshots, AreCountedInHostMemoryAsKeptAndOnceMoreInACheckpoint) {
  const ModelConfig& config = model_.transformer->config();
  const auto host_bytes = [&](size_t snapshots) {
    int64_t bytes = 0;
    for (const MemoryNeed& need : statistics_needs(config, {.snapshots = snapshots, .saved = true}))
      bytes += need.host_bytes;
    return bytes;
  };
  // Four moments of two layers with two heads of 8 x 8, twice.
  EXPECT_EQ(snapshot_bytes(config, 2, false), 2 * 4 * 2 * 2 * 8 * 8 * 8);
  EXPECT_EQ(host_bytes(1002) - host_bytes(1000), 2 * snapshot_bytes(config, 2, false));
  const CollectionPlan planned = plan_collection(*model_.transformer, corpus_.sequences, options_,
                                                 {.host_bytes = int64_t{4} << 30}, 1);
  EXPECT_EQ(planned.snapshot_tokens, plan_snapshots(planned.batches));
  EXPECT_EQ(planned.block_tokens, plan_blocks(planned.batches));
}

TEST_F(Snapshots, AreKeptOfQuantizedLayersOnly) {
  layers_[0].quantized = false;
  const auto sums = collect(plan(12));
  ASSERT_EQ(sums.snapshots.size(), 2U);
  EXPECT_EQ(sums.snapshots[0]->geometry.layer_id, 1);
  const Json record = judged(plan(12), sums);
  EXPECT_EQ(record["layers"]["layer_id"], Json::array({1}));
}

TEST_F(Snapshots, ThatACheckpointLacksAreMissed) {
  EXPECT_THROW(collect(plan(12), 1, /*save_snapshots=*/false), Stopped);
  try {
    CheckpointFile(options_, run_).load(plan(12));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("snapshot_0_000000"), std::string::npos)
        << error.what();
  }
}

TEST_F(Snapshots, OfOtherTokenCountsAreRefused) {
  EXPECT_THROW(collect(plan(12), 1), Stopped);
  CollectionPlan other = plan(12);
  other.snapshot_tokens[0] += 2 * kLength;
  EXPECT_THROW(CheckpointFile(options_, run_).load(other), Error);
}

TEST_F(Snapshots, JudgeTheTextLayerByLayerOrSayWhyNot) {
  const Json record = judged(plan(12), collect(plan(12)));
  EXPECT_EQ(record["tokens"], kSequences * kLength);
  EXPECT_EQ(record["splits"].size(), 3U);
  EXPECT_EQ(record["layers"]["layer_id"].size(), static_cast<size_t>(kSnapshotLayers));
  EXPECT_GT(record["key"]["cost"].get<double>(), 0);
  corpus_.sequences.resize(4);
  corpus_.record.tokens = 4 * kLength;
  const Json few = judged(plan(2), collect(plan(2)));
  EXPECT_TRUE(few.contains("problem")) << few;
  EXPECT_FALSE(needs_more_text(few));
}

}  // namespace
