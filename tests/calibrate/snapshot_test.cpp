// Copies of running sums: where they are taken, that neither plan nor resuming changes them, and
// that a checkpoint without them is refused.
#include <gtest/gtest.h>

#include "calibrate/small_run.h"
#include "oscar/base/error.h"
#include "oscar/calibrate/convergence_stage.h"
#include "oscar/fit/convergence.h"

namespace {

using namespace oscar;
using namespace oscar_test;

constexpr int kSnapshotLayers = 2, kChunks = 24, kLength = 32;

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
  RunPlan plan;
  plan.block_tokens = {10, 20};
  EXPECT_EQ(block_start(plan, 9), 0);
  EXPECT_EQ(block_start(plan, 10), 10);
  EXPECT_EQ(block_start(plan, 19), 10);
  EXPECT_EQ(block_start(plan, 20), 20);
}

class Snapshots : public SmallRun {
 protected:
  Snapshots()
      : SmallRun(kSmallConfig, small_corpus(std::vector<int>(kChunks, kLength)),
                 /*batch_tokens=*/2 * kLength, {.center = true}) {}

  RunPlan plan(size_t batches_per_wave) const {
    RunPlan plan = SmallRun::plan(batches_per_wave);
    plan.snapshot_tokens = plan_snapshots(plan.batches);
    return plan;
  }

  static void expect_equal(const SumSnapshots& a, const SumSnapshots& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(*a[i], *b[i]) << "copy " << i;
  }

  Json judged(const RunPlan& plan, const Sums& sums) {
    SilentProgress progress;
    return judge_convergence(sums.snapshots, sums.statistics, plan, options_.fit, {}, false,
                             progress);
  }
};

TEST_F(Snapshots, AreTheSumsOfTheBatchesBeforeThem) {
  const RunPlan all = plan(12);
  const auto whole = collect(all);
  ASSERT_EQ(whole.snapshots.size(), 2U * kSnapshotLayers);
  corpus_.chunks.resize(kChunks / 2);
  corpus_.record.tokens /= 2;
  RunPlan half = plan(6);
  half.block_tokens = all.block_tokens;
  half.snapshot_tokens.clear();
  auto first = collect(half).statistics;
  for (int layer = 0; layer < kSnapshotLayers; ++layer) {
    first[layer].o_proj_metric = {};
    EXPECT_EQ(*whole.snapshots[2 * layer + 1], first[layer]) << "layer " << layer;
    EXPECT_EQ(whole.snapshots[2 * layer]->count_kv, kChunks * kLength / 4);
  }
}

TEST_F(Snapshots, AndSumsAreOfBlocksThatWereAddedInOrder) {
  const RunPlan whole = plan(12);
  ASSERT_EQ(whole.block_tokens.size(), 8U);
  const auto sums = collect(whole);
  const TokenChunks all = corpus_;
  std::vector<LayerStatistics> total;
  for (int64_t begin = 0; const int64_t end : whole.block_tokens) {
    corpus_.chunks.assign(all.chunks.begin() + begin / kLength, all.chunks.begin() + end / kLength);
    RunPlan block = SmallRun::plan(12);
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
  RunPlan without = plan(5);
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
  const auto batches = plan_batches(corpus_.chunks, 2 * kLength);
  const ModelConfig& config = model_.transformer->config();
  const auto planned = [&](int64_t host_bytes, std::vector<int64_t> marks) {
    PassNeeds needs;
    needs.checkpoint_every = 16;
    needs.snapshot_tokens = std::move(marks);
    return plan_run(*model_.transformer, batches, {.host_bytes = host_bytes}, std::move(needs));
  };
  // So many that writing a checkpoint takes more than a batch does.
  const RunPlan with = planned(int64_t{4} << 30, std::vector<int64_t>(1002));
  const RunPlan without = planned(int64_t{4} << 30, std::vector<int64_t>(1000));
  // Four moments of two layers with two heads of 8 x 8, twice.
  EXPECT_EQ(snapshot_bytes(config, 2, false), 2 * 4 * 2 * 2 * 8 * 8 * 8);
  EXPECT_EQ(with.peak_host_bytes - without.peak_host_bytes, 2 * snapshot_bytes(config, 2, false));
  EXPECT_EQ(planned(int64_t{4} << 30, plan_snapshots(batches)).snapshot_tokens.size(), 2U);
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
  RunPlan other = plan(12);
  other.snapshot_tokens[0] += 2 * kLength;
  EXPECT_THROW(CheckpointFile(options_, run_).load(other), Error);
}

TEST_F(Snapshots, JudgeTheTextLayerByLayerOrSayWhyNot) {
  const Json record = judged(plan(12), collect(plan(12)));
  EXPECT_EQ(record["tokens"], kChunks * kLength);
  EXPECT_EQ(record["splits"].size(), 3U);
  EXPECT_EQ(record["layers"]["layer_id"].size(), static_cast<size_t>(kSnapshotLayers));
  EXPECT_GT(record["key"]["cost"].get<double>(), 0);
  corpus_.chunks.resize(4);
  corpus_.record.tokens = 4 * kLength;
  const Json few = judged(plan(2), collect(plan(2)));
  EXPECT_TRUE(few.contains("problem")) << few;
  EXPECT_FALSE(needs_more_text(few));
}

}  // namespace
