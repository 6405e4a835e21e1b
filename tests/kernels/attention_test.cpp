// Decode attention on the GPU against float64 attention over the dequantized cache.
#include "oscar_kernels/attention.h"

#include <gtest/gtest.h>

#include "kernels/attention_outcome.h"
#include "kernels/prepared_workspace.h"
#include "kernels/random_cache.h"
#include "support/slowed.h"

namespace {

using oscar_test::CacheShape;
using oscar_test::Content;
using oscar_test::DeviceBuffer;
using oscar_test::DeviceCache;
using oscar_test::half_step;
using oscar_test::kLseBound;
using oscar_test::kOutputBound;
using oscar_test::Outcome;
using oscar_test::PreparedWorkspace;
using oscar_test::RandomCache;
using oscar_test::Reference;
using oscar_test::unless_slowed;

void run(DeviceCache& device, DeviceBuffer<uint8_t>& workspace, Outcome& outcome) {
  device.o.fill(0xff);  // NaN, so that an unwritten output shows
  device.lse.fill(0xff);
  ASSERT_CUDA(oscar::decode_attention(device.params, workspace.get(), workspace.count(), nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
  outcome.o = device.o.download();
  outcome.lse = device.lse.download();
}

struct Case {
  std::string name;
  CacheShape shape;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class DecodeAttention : public testing::TestWithParam<Case> {};

TEST_P(DecodeAttention, EqualsFloat64AttentionAndRepeatsBitForBit) {
  OSCAR_NEEDS_DEVICE();
  RandomCache host(GetParam().shape, 17);
  DeviceCache device(host);
  PreparedWorkspace workspace(device.params);
  Outcome first, second;
  ASSERT_NO_FATAL_FAILURE(run(device, workspace, first));
  ASSERT_NO_FATAL_FAILURE(run(device, workspace, second));
  EXPECT_EQ(first.o, second.o);
  EXPECT_EQ(0, memcmp(first.lse.data(), second.lse.data(), first.lse.size() * 4));
  double output_error = 0.0, lse_error = 0.0;
  ASSERT_NO_FATAL_FAILURE(compare(host, first, &output_error, &lse_error));
  RecordProperty("output_error", std::to_string(output_error));
  printf("%s: output %.2e lse %.2e\n", GetParam().name.c_str(), output_error, lse_error);
  EXPECT_LE(output_error, kOutputBound);
  EXPECT_LE(lse_error, kLseBound);
  EXPECT_TRUE(device.guards_intact());
  EXPECT_TRUE(workspace.guards_intact());
}

CacheShape lengths(std::vector<int> seq_lens, Content content = Content::kRandom) {
  CacheShape shape;
  shape.seq_lens = std::move(seq_lens);
  shape.content = content;
  return shape;
}
CacheShape with_heads(CacheShape shape, int qo, int kv, int q_len = 1) {
  shape.num_qo_heads = qo, shape.num_kv_heads = kv, shape.q_len = q_len;
  return shape;
}
std::vector<Case> cases() {
  std::vector<Case> all = {
      {"boundary lengths", lengths({1, 63, 64, 65, 319, 320, 321, 322})},
      {"page tails", lengths({383, 384, 385, 447, 448, 449, 352, 353})},
      {"one long request", with_heads(lengths({20000}), 8, 1)},
      {"one request, one head", with_heads(lengths({3000}), 1, 1)},
      {"ragged batch", lengths({5000, 1, 700, 12000, 320, 64, 2500, 330})},
      {"many short requests", lengths(std::vector<int>(100, 400))},
      {"unused places", lengths({0, 500, 0})},
      {"nothing but unused places", lengths({0, 0, 0})},
      {"unused places, two queries", with_heads(lengths({0, 1, 900, 0}), 8, 2, 2)},
      {"dominant token", lengths({5000, 900}, Content::kDominantToken)},
      {"flat 128K", with_heads(lengths({unless_slowed(131072, 16384)}, Content::kFlat), 4, 1)},
      {"ascending logits", lengths({4000, 777}, Content::kAscending)},
      {"wide scales", lengths({3000, 500}, Content::kWideScales)},
      {"query outliers", lengths({3000, 500}, Content::kQueryOutliers)},
      {"GQA 1", with_heads(lengths({2000, 350}), 4, 4)},
      {"GQA 3", with_heads(lengths({2000, 350}), 6, 2)},
      {"GQA 8", with_heads(lengths({2000, 350}), 16, 2)},
      {"GQA 16", with_heads(lengths({2000, 350}), 32, 2)},
      {"two queries", with_heads(lengths({2000, 350, 2, 64, 65}), 8, 2, 2)},
      {"four queries of GQA 5", with_heads(lengths({2000, 350, 4, 66}), 10, 2, 4)},
  };
  CacheShape no_sink = lengths({1000, 20, 300});
  no_sink.sink = 0;
  all.push_back({"no sink", no_sink});
  CacheShape small_windows = lengths({1000, 20, 300});
  small_windows.sink = 5, small_windows.recent = 17;
  all.push_back({"small windows", small_windows});
  // So many that pieces of items no longer fit in shared memory beside the plan.
  CacheShape thousands = with_heads(lengths({}), 8, 1);
  thousands.sink = 3, thousands.recent = 8;
  const int longest = unless_slowed(150, 30);
  for (int i = 0; i < 3500; ++i) thousands.seq_lens.push_back(1 + i * 37 % longest);
  all.push_back({"thousands of requests", thousands});
#if OSCAR_KERNELS_FULL
  const auto format = [](int d, int group, oscar::MetadataDtype metadata) {
    CacheShape shape = with_heads(lengths({3000, 350, 1, 400}), 8, 2);
    shape.head_dim = d, shape.quant_group_size = group;
    shape.metadata = metadata;
    return shape;
  };
  using oscar::MetadataDtype;
  const size_t first_format = all.size();
  all.push_back({"d 64", format(64, 64, MetadataDtype::kFp16)});
  all.push_back({"d 64 fp32", format(64, 64, MetadataDtype::kFp32)});
  all.push_back({"d 128 fp32", format(128, 128, MetadataDtype::kFp32)});
  all.push_back({"d 128 bf16", format(128, 128, MetadataDtype::kBf16)});
  all.push_back({"d 128 group 64", format(128, 64, MetadataDtype::kFp16)});
  all.push_back({"d 256", format(256, 256, MetadataDtype::kFp16)});
  all.push_back({"d 256 fp32", format(256, 256, MetadataDtype::kFp32)});
  all.push_back({"d 256 group 128", format(256, 128, MetadataDtype::kFp16)});
  all.push_back({"d 256 group 64", format(256, 64, MetadataDtype::kFp16)});
  for (size_t i = first_format, count = all.size(); i < count; ++i) {
    Case full_tiles = all[i];  // the others have four columns an item, and kernels of their own
    full_tiles.name += ", GQA 8";
    full_tiles.shape.num_qo_heads = 16;
    all.push_back(full_tiles);
  }
  CacheShape wide = format(64, 64, MetadataDtype::kFp32);
  wide.content = Content::kWideScales;
  all.push_back({"d 64 fp32 wide scales", wide});
#endif
  for (size_t i = 0, count = all.size(); i < count; ++i) {  // three segments, the last one clamped
    Case centered = all[i];
    centered.name += ", key centers";
    centered.shape.center_segments = 3;
    all.push_back(centered);
  }
  CacheShape far = with_heads(lengths({9000, 700, 3}), 8, 2);
  far.center_segments = 12, far.center_size = 8.0f;
  all.push_back({"key centers far apart", far});
  far.num_qo_heads = 16;
  all.push_back({"key centers far apart, GQA 8", far});
  CacheShape many = with_heads(lengths({40000, unless_slowed(29000, 700)}), 4, 1);
  many.center_segments = 35;
  all.push_back({"many segments of key centers", many});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Shapes, DecodeAttention, testing::ValuesIn(cases()));

TEST(DecodeAttentionGraph, ReplaysOneKernelWithLengthsThatChangedAfterCapture) {
  OSCAR_NEEDS_DEVICE();
  const auto centered = [](std::vector<int> lens) {
    CacheShape shape = lengths(std::move(lens));
    shape.center_segments = 4;
    shape.table_pages = 80;
    return shape;
  };
  RandomCache host(centered({3000, 900, 5000}), 23);
  DeviceCache device(host);
  PreparedWorkspace workspace(device.params);
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  ASSERT_CUDA(oscar::decode_attention(device.params, workspace.get(), workspace.count(), stream));
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  size_t nodes = 0;
  ASSERT_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 1u);
  cudaGraphExec_t exec;
  ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  const std::vector<std::vector<int>> later = {
      {3000, 900, 5000}, {40, 4500, 321}, {0, 5000, 0}, {1, 1, 1}};
  for (const std::vector<int>& lens : later) {
    RandomCache now(centered(lens), 29);
    DeviceCache moved(now);
    // Same addresses, other content: lengths, block table, rows and key centers.
    device.lens.upload(now.lens);
    device.history.upload(now.history);
    device.table.upload(now.table);
    device.slots.upload(now.slots);
    device.wk.upload(now.wk);
    device.wv.upload(now.wv);
    device.q.upload(now.q);
    device.centers.upload(now.centers);
    device.first_position.upload(now.first_position);
    ASSERT_LE(now.pool.size(), device.pool.count());
    device.pool.upload(now.pool);
    device.o.fill(0xff);
    ASSERT_CUDA(cudaGraphLaunch(exec, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    const Outcome outcome{device.o.download(), device.lse.download()};
    double output_error = 0.0, lse_error = 0.0;
    ASSERT_NO_FATAL_FAILURE(compare(now, outcome, &output_error, &lse_error));
    EXPECT_LE(output_error, kOutputBound);
    EXPECT_LE(lse_error, kLseBound);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// Largest error of a row beyond bf16 rounding, relative to the row, over all copies of one request.
double worst_row(const Reference& expected, const Outcome& outcome, int copies) {
  double worst = 0.0;
  const size_t rows = expected.lse.size(), d = static_cast<size_t>(expected.d);
  for (size_t at = 0; at < rows * static_cast<size_t>(copies); ++at) {
    const double* const o = expected.o.data() + at % rows * d;
    double own = 0.0, norm = 0.0;
    for (size_t i = 0; i < d; ++i) {
      const double x = oscar::bf16_to_float(outcome.o[at * d + i]);
      EXPECT_TRUE(std::isfinite(x)) << "row " << at << " dim " << i;
      const double beyond = std::max(0.0, std::fabs(x - o[i]) - half_step(o[i]));
      own += beyond * beyond;
      norm += o[i] * o[i];
    }
    worst = std::max(worst, std::sqrt(own / norm));
    EXPECT_NEAR(outcome.lse[at], expected.lse[at % rows], kLseBound * expected.lse[at % rows]);
  }
  return worst;
}

// So many requests that a warp's piece has more segments than it works out together. They are one
// request again and again, which each piece cuts elsewhere. Values of 10,000 tokens nearly cancel,
// so a piece as long errs more than others; centers add nothing to that. One page with the centers
// of a neighbouring segment would show as an error of a percent.
TEST(DecodeAttentionCenters, GoOnBeyondEightSegmentsOfOneWarp) {
  OSCAR_NEEDS_DEVICE();
  int blocks = 0;
  ASSERT_CUDA(cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, 0));
  constexpr int kLength = 100000, kWarps = 12;
  const int pages = unless_slowed(170, 132);  // at least, of a warp; a segment has 16
  const int copies = blocks * kWarps * pages / (kLength / 64) + 1;
  for (const int queries : {4, 8}) {
    double worst[2] = {};
    for (const bool centers : {false, true}) {
      // The first pass is there to be compared with; other tests run its kernel.
      if (!centers && oscar_test::slowed()) continue;
      CacheShape shape = with_heads(lengths({kLength}), queries, 1);
      shape.center_segments = centers ? 80 : 0;
      RandomCache host(shape, 31);
      const Reference expected(host);
      RandomCache all = host;
      const auto repeat = [&](auto& values) {
        const auto once = values;
        for (int i = 1; i < copies; ++i) values.insert(values.end(), once.begin(), once.end());
      };
      repeat(all.table), repeat(all.history), repeat(all.lens), repeat(all.slots);
      repeat(all.first_position), repeat(all.q);
      DeviceCache device(all);
      PreparedWorkspace workspace(device.params);
      Outcome outcome;
      ASSERT_NO_FATAL_FAILURE(run(device, workspace, outcome));
      worst[centers] = worst_row(expected, outcome, copies);
    }
    std::printf("%d heads: worst row %.2e without centers, %.2e with\n", queries, worst[0],
                worst[1]);
    if (!oscar_test::slowed()) {
      EXPECT_LE(worst[1], 2.0 * worst[0]) << queries;
    }
    EXPECT_LE(worst[1], 5e-3) << queries;
  }
}

TEST(DecodeAttentionArguments, ShapesThatCannotWorkAreRefusedBeforeAnyLaunch) {
  OSCAR_NEEDS_DEVICE();
  RandomCache host(lengths({400}), 1);
  DeviceCache device(host);
  size_t bytes = 0;
  ASSERT_CUDA(oscar::decode_attention_workspace(device.params, &bytes));
  DeviceBuffer<uint8_t> workspace(bytes);
  const auto status = [&](auto change) {
    oscar::AttentionParams p = device.params;
    change(p);
    return oscar::decode_attention(p, workspace.get(), bytes, nullptr);
  };
  EXPECT_EQ(status([](auto& p) { p.q_len = 5; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.batch = 0; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.num_qo_heads = 7; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.format.head_dim = 96; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.q = nullptr; }), cudaErrorInvalidValue);
  EXPECT_EQ(status([](auto& p) { p.centers.rows = p.q; }), cudaErrorInvalidValue);  // no segment
  EXPECT_EQ(oscar::decode_attention(device.params, workspace.get(), 1024, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
