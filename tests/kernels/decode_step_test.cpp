// Append and attention as a server calls them: one after the other in a stream, nothing in between.
#include <gtest/gtest.h>

#include <random>

#include "kernels/prepared_workspace.h"
#include "oscar_kernels/append.h"
#include "oscar_kernels/attention.h"

namespace {

using oscar_test::DeviceBuffer;
using oscar_test::PreparedWorkspace;

// Rows [at, at + count) arrive; those before `final_length` can no longer be taken back.
struct Step {
  int at, count, final_length;
  unsigned seed;
};

constexpr int kHeads = 2, kQueryHeads = 8, kDim = 128, kSink = 4, kRecent = 20, kRing = kRecent + 9;
constexpr int kPages = 12;

std::vector<uint16_t> random_rows(size_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> rows(count);
  for (uint16_t& x : rows) x = oscar::float_to_bf16(normal(rng));
  return rows;
}

// Runs the steps of one request on an empty cache, each followed by attention of its last `q_len`
// positions; returns the outputs of all steps. settled: attention is told what append writes.
std::vector<uint16_t> run(const std::vector<Step>& steps, int q_len, bool synchronise,
                          bool settled = false) {
  const oscar::PageFormat format;
  const int count = static_cast<int>(steps.size());
  std::vector<int32_t> table(kPages), rows, old_len, new_len, old_history, history;
  for (int i = 0; i < kPages; ++i) table[i] = (5 * i + 3) % kPages;
  std::vector<uint16_t> k, v;
  std::vector<size_t> first_row;
  int before = 0;
  for (const Step& step : steps) {  // everything is uploaded ahead: launches can follow at once
    const int now = oscar::history_for_length(step.final_length, kSink, kRecent, 1);
    rows.insert(rows.end(), {0, step.count});
    old_len.push_back(step.at);
    new_len.push_back(step.at + step.count);
    old_history.push_back(before);
    history.push_back(before = now);
    first_row.push_back(k.size());
    const size_t size = static_cast<size_t>(step.count) * kHeads * kDim;
    const auto new_k = random_rows(size, step.seed), new_v = random_rows(size, step.seed + 1);
    k.insert(k.end(), new_k.begin(), new_k.end());
    v.insert(v.end(), new_v.begin(), new_v.end());
  }
  const size_t output = static_cast<size_t>(q_len) * kQueryHeads * kDim;
  DeviceBuffer<uint8_t> pool(static_cast<size_t>(kPages) * kHeads * page_bytes(format));
  DeviceBuffer<uint16_t> wk(static_cast<size_t>(kHeads) * (kSink + kRing) * kDim), wv(wk.count());
  DeviceBuffer<uint16_t> o(output * count);
  pool.fill(0xff), wk.fill(0xff), wv.fill(0xff), o.fill(0xff);
  const DeviceBuffer<uint16_t> dk(k), dv(v), q(random_rows(output * count, 77));
  const DeviceBuffer<uint16_t> centers(random_rows(2 * kHeads * 2 * kDim, 78));
  const DeviceBuffer<int32_t> first_position(std::vector<int32_t>{800});  // the second from 1024 on
  const DeviceBuffer<int32_t> dtable(table), drows(rows), dold_len(old_len), dnew_len(new_len),
      dold_history(old_history), dhistory(history);
  oscar::AttentionParams read;
  read.windows = {wk.get(), wv.get(), nullptr, kSink, kRing};
  read.centers = {centers.get(), 2, first_position.get()};
  read.sm_scale = 0.0883883f;
  read.batch = 1, read.q_len = q_len, read.num_qo_heads = kQueryHeads, read.num_kv_heads = kHeads;
  PreparedWorkspace workspace(read);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int i = 0; i < count; ++i) {
    oscar::AppendParams write;
    write.history = {pool.get(), dtable.get(), kPages, dhistory.get() + i};
    write.windows = read.windows;
    write.centers = read.centers;
    write.k = oscar::contiguous_rows(dk.get() + first_row[i], kHeads, kDim);
    write.v = oscar::contiguous_rows(dv.get() + first_row[i], kHeads, kDim);
    write.query_start_loc = drows.get() + 2 * i;
    write.old_len = dold_len.get() + i;
    write.old_history = dold_history.get() + i, write.new_history = dhistory.get() + i;
    write.batch = 1, write.num_kv_heads = kHeads;
    EXPECT_EQ(append_rows(write, steps[i].count, history[i] - old_history[i], nullptr),
              cudaSuccess);
    if (synchronise) {
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    read.history = write.history;
    read.seq_lens = dnew_len.get() + i;
    read.q = q.get() + output * i, read.o = o.get() + output * i;
    const int demoted = history[i] - old_history[i];
    EXPECT_EQ(decode_attention(read, workspace.get(), workspace.count(), nullptr,
                               settled ? 1 + (demoted + 62) / 64 : -1),
              cudaSuccess);
    if (synchronise) {
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(pool.guards_intact() && wk.guards_intact() && wv.guards_intact());
  const std::vector<uint16_t> result = o.download();
  for (const uint16_t x : result) EXPECT_LT(x & 0x7fff, 0x7f80) << "not finite";
  return result;
}

TEST(DecodeSteps, RowsDemotedAndReadInAdjacentLaunchesGiveTheBitsOfSeparateOnes) {
  OSCAR_NEEDS_DEVICE();
  std::vector<Step> steps = {{0, 300, 300, 1000}};
  for (int i = 0; i < 150; ++i) steps.push_back({300 + i, 1, 301 + i, 2000u + 2 * i});
  EXPECT_TRUE(run(steps, 1, false) == run(steps, 1, true));
}

TEST(DecodeSteps, PagesReadBeforeTheAppendAheadHasEndedAreThoseItLeavesAlone) {
  OSCAR_NEEDS_DEVICE();
  std::vector<Step> steps = {{0, 90, 90, 1000}};
  for (unsigned i = 0; i < 16; ++i) {  // within a page, to its end, over one or two ends
    const int at = steps.back().at + steps.back().count;
    const int count = std::vector<int>{1, 1, 4, 70, 1, 64, 2, 130}[i % 8];
    steps.push_back({at, count, at + count, 2000 + 2 * i});
  }
  EXPECT_TRUE(run(steps, 1, false, true) == run(steps, 1, true));
}

TEST(DecodeSteps, RejectedDraftTokensLeaveNoTrace) {
  OSCAR_NEEDS_DEVICE();
  // Four drafts at 300, all rejected; then other rows in their place, as if never drafted.
  const std::vector<Step> drafted = {
      {0, 300, 300, 1000}, {300, 4, 300, 50}, {300, 1, 301, 60}, {301, 3, 304, 70}};
  const std::vector<Step> plain = {
      {0, 300, 300, 1000}, {300, 1, 300, 60}, {300, 1, 301, 60}, {301, 3, 304, 70}};
  const auto with = run(drafted, 4, false), without = run(plain, 4, false);
  const size_t half = with.size() / 2;  // the outputs of the two steps after the rejection
  EXPECT_TRUE(std::equal(with.begin() + half, with.end(), without.begin() + half));
  EXPECT_FALSE(with == without);  // the drafts themselves were seen
}

}  // namespace
